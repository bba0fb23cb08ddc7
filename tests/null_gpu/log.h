#pragma once

/* What a GPU was asked for, a line each, in the file that NULL_GPU_LOG names. */
__attribute__((format(printf, 1, 2))) void null_gpu_log(const char *format, ...);

/* Whether the memory at an address is the GPU's, and not the process's own. */
int null_gpu_has(const void *address);
