/* CUDA's driver, as Triton's launchers and PyTorch call it: kernels are loaded, and do nothing. */
#include "log.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <string.h>

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count); }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

/* The runtime has the driver's attributes under the same numbers, but for some of the driver's own. */
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED) { /* PyTorch wants it for registered memory */
    *value = 1;
    return CUDA_SUCCESS;
  }
  return cudaDeviceGetAttribute(value, attribute, device);
}

static CUcontext the_context(void) {
  static int context;
  return (CUcontext)&context;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = the_context();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "the null GPU knows no errors";
  return CUDA_SUCCESS;
}

/* Triton asks about what it gives to kernels, which read no memory but the GPU's. */
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  if (!null_gpu_has((const void *)address))
    return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr *)value = address;
  else
    *(int *)value = CU_MEMORYTYPE_DEVICE;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)the_context();
  return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule *module, const char *file) { return cuModuleLoadData(module, NULL); }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)strdup(name);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

static CUresult launch(CUfunction function, CUstream stream) {
  null_gpu_log("kernel %p %s", (void *)stream, (const char *)function);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
  return launch(function, stream);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  return launch(function, config->hStream);
}

CUresult cuGetProcAddress(const char *name, void **entry, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *found) {
  *entry = dlsym(dlopen("libcuda.so.1", RTLD_LAZY), name);
  if (found != NULL)
    *found = *entry == NULL ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
  return *entry == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
