#!/usr/bin/env python3
"""Makes quant_fixture.txt: payloads, what they are quantised, and what comes back, computed by
numpy and ml_dtypes (their float16, bfloat16 and float8_e4m3fn), which know nothing of kernels/.

    make_fixture.py              write it beside this script
    make_fixture.py --check      make it again and compare; exit 77 where a package is missing

A case is four lines: kind, element, order and sizes (planes, tokens, heads, head_dim), then
bytes in hex: raw, quantised, back."""
import os
import random
import sys

try:
    import ml_dtypes
    import numpy
except ImportError as error:
    print("SKIP: needs numpy and ml_dtypes (%s)" % error)
    sys.exit(77)

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "quant_fixture.txt")
CODE_MAX = {"fp8": numpy.float32(448), "int8": numpy.float32(127)}
ELEM = {"fp16": numpy.float16, "bf16": ml_dtypes.bfloat16}
NAN = {"fp16": 0x7E00, "bf16": 0x7FC0}
# (planes, tokens, heads, head_dim)
SIZES = [(1, 1, 1, 1), (3, 1, 1, 5), (2, 2, 3, 8), (1, 4, 2, 16), (2, 3, 1, 24), (1, 2, 1, 64)]


def random_halves(generator, elem, count):
    """Numbers within a few powers of two of each other, and now and then any 16 bits."""
    exponent_bits = 5 if elem == "fp16" else 8
    mantissa_bits = 15 - exponent_bits
    top = generator.randrange(4, (1 << exponent_bits) - 1)
    halves = []
    for _ in range(count):
        exponent = max(top - generator.randrange(12), 0)
        half = generator.getrandbits(1) << 15 | exponent << mantissa_bits
        half |= generator.getrandbits(mantissa_bits)
        halves.append(generator.getrandbits(16) if generator.random() < 0.06 else half)
    return numpy.array(halves, dtype=numpy.uint16)


def scale_of(values, kind):
    finite = numpy.abs(values[numpy.isfinite(values)])
    scale = numpy.max(finite, initial=numpy.float32(0)) / CODE_MAX[kind]
    return scale if scale >= numpy.finfo(numpy.float32).tiny else numpy.float32(1)


def encode(values, scale, kind):
    quotients = numpy.clip(values / scale, -CODE_MAX[kind], CODE_MAX[kind])
    negative_nan = numpy.signbit(values) & numpy.isnan(values)
    if kind == "int8":
        whole = numpy.where(numpy.isnan(values), numpy.float32(-128), numpy.rint(quotients))
        return whole.astype(numpy.int8).view(numpy.uint8)
    codes = quotients.astype(ml_dtypes.float8_e4m3fn).view(numpy.uint8)
    return numpy.where(numpy.isnan(values), numpy.where(negative_nan, 0xFF, 0x7F), codes)


def decode(codes, scale, kind, elem):
    codes = codes.astype(numpy.uint8)
    if kind == "int8":
        is_nan, sign = codes == 0x80, numpy.zeros(codes.shape, numpy.uint16)
        values = codes.view(numpy.int8).astype(numpy.float32)
    else:
        is_nan, sign = codes & 0x7F == 0x7F, (codes & 0x80).astype(numpy.uint16) << 8
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(numpy.float32)
    halves = (values * scale).astype(ELEM[elem]).view(numpy.uint16)
    return numpy.where(is_nan, sign | NAN[elem], halves).astype(numpy.uint16)


def pad16(data):
    return data + bytes(-len(data) % 16)


def case(generator, kind, elem, order, size):
    planes, tokens, heads, dim = size
    shape = (planes, tokens, heads, dim) if order == "nhd" else (planes, heads, tokens, dim)
    raw = random_halves(generator, elem, planes * tokens * heads * dim).reshape(shape)
    values = raw.view(ELEM[elem]).astype(numpy.float32)
    codes = numpy.zeros(shape, numpy.uint8)
    back = numpy.zeros(shape, numpy.uint16)
    scales = numpy.zeros((planes, heads), numpy.float32)
    for plane in range(planes):
        for head in range(heads):
            at = (plane, slice(None), head) if order == "nhd" else (plane, head)
            scale = scale_of(values[at], kind)
            scales[plane, head] = scale
            codes[at] = encode(values[at], scale, kind)
            back[at] = decode(codes[at], scale, kind, elem)
    quantised = pad16(codes.tobytes()) + pad16(scales.tobytes())
    return "%s %s %s %d %d %d %d\n%s\n%s\n%s\n" % (
        kind, elem, order, planes, tokens, heads, dim,
        raw.tobytes().hex(), quantised.hex(), back.tobytes().hex())


def main():
    generator = random.Random(20)
    text = ""
    with numpy.errstate(all="ignore"):
        for kind in ("fp8", "int8"):
            for elem in ("fp16", "bf16"):
                for order in ("nhd", "hnd"):
                    for size in SIZES:
                        text += case(generator, kind, elem, order, size)
    if sys.argv[1:] != ["--check"]:
        with open(PATH, "w", encoding="ascii") as file:
            file.write(text)
        return
    with open(PATH, encoding="ascii") as file:
        if file.read() != text:
            sys.exit("quant_fixture.txt is not what numpy makes: write it anew, or find out why")


main()
