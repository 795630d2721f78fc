/* The program over the CUDA of this build; the tests have another main, over the fake. */
#include "tools/kvtier-gpu-check/gpu_check.h"

int main(int argc, char **argv)
{
    return gpu_check_main(argc, argv, (struct gpu_check_hooks){0});
}
