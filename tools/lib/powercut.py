"""What a power cut would have left of a directory, made of the journal that tests/common's
powercut_shim.c wrote while a program changed it (the format is there and in HEADER here).

The model, by file:
- A write is safe when it had come back before a sync of its file began that came back well, or
  when its descriptor was opened with O_DSYNC and it came back well (itself, nothing before it).
- Of every other write, by chance: all of it is there, nothing, or any of its 512-byte sectors. The
  chances are independent: a later write may be there and an earlier one not.
- A size (truncate, fallocate) is safe by the same sync; the ones after that, up to some moment.
- A name (create, rename, unlink) is safe when its directory was synced, and a created one when its
  file was; the ones after that, up to some moment: file systems keep their order.
- Two writes to one sector keep their order: what came back first cannot overwrite what began later.

What was never written through the shim (a shared mapping) is what it was before: zero, or what the
last cut left."""
import os
import struct

MAGIC = 0x5743574F50766B21
HEADER = struct.Struct("<QQQqqIIII")
WRITE, SYNC, SIZE, CREATE, RENAME, UNLINK, END = 1, 2, 3, 4, 5, 6, 16
DSYNC, DIRECTORY, NO_DATA = 1, 2, 4
SECTOR = 512
# Chances (all, nothing, torn) of a write that is not safe; one row is drawn for each cut.
FATES = ((0, 1, 0), (1, 0, 0), (.5, .3, .2), (.2, .2, .6), (.9, .05, .05), (.05, .9, .05))


class Call:
    """One call that was made, or begun."""

    def __init__(self, number, fields, path, data):
        _, self.id, self.inode, self.offset, _, self.kind, self.flags, _, _ = fields
        self.began, self.ended, self.result = number, None, None
        self.path, self.data = path, data
        self.is_safe = False

    def is_done(self):
        return self.ended is not None and self.result >= 0


def read_journal(path):
    """Calls in the order in which they began. A record that a killed process did not finish is no
    record: the call was never made."""
    with open(path, "rb") as file:
        raw = file.read()
    magic = struct.pack("<Q", MAGIC)
    calls, by_id, at, number = [], {}, 0, 0
    while at + HEADER.size <= len(raw):
        fields = HEADER.unpack_from(raw, at)
        end = at + HEADER.size + fields[7] + fields[8]
        if fields[0] != MAGIC or end > len(raw) or \
                not magic.startswith(raw[end:end + 8]):
            at = raw.find(magic, at + 1)
            if at < 0:
                break
            continue
        number += 1
        if fields[5] == END:
            call = by_id.get(fields[1])
            if call is not None:
                call.ended, call.result = number, fields[4]
        else:
            middle = at + HEADER.size + fields[7]
            call = Call(number, fields, raw[at + HEADER.size:middle].decode(), raw[middle:end])
            calls.append(call)
            by_id[call.id] = call
        at = end
    return calls


class File:
    """A file as the disk has it; its bytes lie in the mirror's store."""

    def __init__(self, store, number):
        self.path = os.path.join(store, str(number))
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self.calls = []  # writes and sizes since the last cut, in order
        self.touched = []  # ranges that were written
        self.is_patchable = True  # nothing but those can differ from what the program saw

    def bytes(self):
        return os.fstat(self.fd).st_size

    def close(self):
        os.close(self.fd)
        os.unlink(self.path)


class Mirror:
    """The directory as the disk has it. Made before a program starts to write there; cut() when the
    program was killed, which leaves the directory as the power cut would have left it."""

    def __init__(self, directory, store):
        self.directory, self.store = os.path.realpath(directory), store
        self.files, self.names, self.inodes = [], {}, {}
        self.counts = {"safe": 0, "whole": 0, "lost": 0, "torn": 0, "names_lost": 0}
        for name in sorted(os.listdir(self.directory)):
            with open(os.path.join(self.directory, name), "rb") as source:
                file = self.new_file()
                os.pwrite(file.fd, source.read(), 0)
                self.names[name] = file
                self.inodes[os.fstat(source.fileno()).st_ino] = file

    def new_file(self):
        file = File(self.store, max((int(os.path.basename(f.path)) for f in self.files),
                                    default=0) + 1)
        self.files.append(file)
        return file

    def close(self):
        for file in self.files:
            file.close()
        self.files = []

    def cut(self, journal, random):
        """Applies @journal as a power cut at its end would have; it becomes @journal.last."""
        calls = read_journal(journal)
        names, safe_names = self.sort_out(calls)
        chances = random.choice(FATES)
        for file in self.files:
            self.cut_file(file, chances, random)
        self.cut_names(names, safe_names, random)
        self.restore()
        os.rename(journal, journal + ".last")

    def sort_out(self, calls):
        """Gives each call to its file and marks what is safe. Returns the calls that change names
        (with their file) and how many of them are safe."""
        inodes, names, safe_names = dict(self.inodes), [], 0
        for call in calls:
            if call.kind == CREATE:
                inodes[call.inode] = self.new_file()
            if call.kind in (CREATE, RENAME, UNLINK):
                names.append((call, inodes.get(call.inode)))
            file = inodes.get(call.inode)
            if call.kind in (WRITE, SIZE) and file is not None:
                file.calls.append(call)
                call.is_safe = call.is_done() and bool(call.flags & DSYNC) and call.kind == WRITE
            if call.kind != SYNC or not call.is_done():
                continue
            if call.flags & DIRECTORY:
                safe_names = max([safe_names] + [i + 1 for i, (name, _) in enumerate(names)
                                                 if is_before(name, call)])
            elif file is not None:
                for earlier in file.calls:
                    if earlier.kind == SIZE or not call.flags & NO_DATA:
                        earlier.is_safe |= is_before(earlier, call)
                safe_names = max([safe_names] + [i + 1 for i, (name, of) in enumerate(names)
                                                 if name.kind == CREATE and of is file])
        return names, safe_names

    def cut_file(self, file, chances, random):
        sizes = [call for call in file.calls if call.kind == SIZE]
        safe = max((i + 1 for i, call in enumerate(sizes) if call.is_safe), default=0)
        kept_sizes = set(sizes[:random.randint(safe, len(sizes))])
        for call in file.calls:
            if call.kind == SIZE:
                file.is_patchable &= call.is_safe and call.offset >= file.bytes()
                if call in kept_sizes:
                    os.ftruncate(file.fd, call.offset)
                continue
            data = call.data if not call.is_done() else call.data[:call.result]
            file.touched.append((call.offset, len(data)))
            self.write(file, call, data, chances, random)
        file.calls = []

    def write(self, file, call, data, chances, random):
        if call.ended is not None and call.result < 0:
            return  # the system refused it
        fate = "safe" if call.is_safe else random.choices(("whole", "lost", "torn"), chances)[0]
        self.counts[fate] += 1
        if fate in ("safe", "whole"):
            os.pwrite(file.fd, data, call.offset)
        elif fate == "torn":
            for at, end in sectors(call.offset, len(data)):
                if random.random() < .5:
                    os.pwrite(file.fd, data[at - call.offset:end - call.offset], at)

    def cut_names(self, names, safe, random):
        kept = random.randint(safe, len(names))
        self.counts["names_lost"] += len(names) - kept
        for call, file in names[:kept]:
            name = os.path.basename(call.path)
            if call.ended is not None and call.result < 0:
                continue
            if call.kind == CREATE:
                self.names[name] = file
            elif call.kind == UNLINK:
                self.names.pop(name, None)
            elif name in self.names:
                self.names[os.path.basename(call.data.decode())] = self.names.pop(name)

    def restore(self):
        """Makes the directory what the mirror is; files that kept name and size are patched."""
        for name in os.listdir(self.directory):
            if name not in self.names:
                os.unlink(os.path.join(self.directory, name))
        inodes = {}
        for name, file in self.names.items():
            path = os.path.join(self.directory, name)
            is_same = os.path.exists(path) and self.inodes.get(os.stat(path).st_ino) is file
            if not is_same or not file.is_patchable or file.bytes() < PATCHED_BYTES_MIN:
                file.touched = [(0, file.bytes())]
            with open(path, "r+b" if os.path.exists(path) else "x+b") as target:
                os.fchmod(target.fileno(), 0o600)
                target.truncate(file.bytes())
                for offset, count in file.touched:
                    os.pwrite(target.fileno(), os.pread(file.fd, count, offset), offset)
                inodes[os.fstat(target.fileno()).st_ino] = file
            file.touched, file.is_patchable = [], True
        for file in [file for file in self.files if file not in self.names.values()]:
            file.close()
            self.files.remove(file)
        self.inodes = inodes


# Smaller files are written anew each time: LMDB's lock file, which is written through a mapping.
PATCHED_BYTES_MIN = 1 << 20


def is_before(call, sync):
    return call.ended is not None and call.ended < sync.began


def sectors(offset, count):
    """(first, end) of the parts of [offset, offset + count) by sector."""
    at = offset
    while at < offset + count:
        end = min((at // SECTOR + 1) * SECTOR, offset + count)
        yield at, end
        at = end
