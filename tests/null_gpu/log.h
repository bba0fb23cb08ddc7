/* What a GPU was asked for, a line each, in the file that NULL_GPU_LOG names. */
#pragma once

__attribute__((format(printf, 1, 2))) void null_gpu_log(const char *format, ...);
