/* CUDA's runtime on a machine without a GPU: memory is the host's, kernels do nothing, and all succeeds.

   Streams and events are numbers. What happens on them is logged in the order in which it was asked for. */
#include "computes.h"
#include "log.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DEVICE_BYTES (80ul << 30)
#define LARGE (1ul << 20) /* bytes between two places on a device that are not worth copying */

void null_gpu_log(const char *format, ...) {
  static FILE *file;
  if (file == NULL) {
    const char *path = getenv("NULL_GPU_LOG");
    file = fopen(path == NULL ? "/dev/null" : path, "w");
    setlinebuf(file);
  }
  va_list values;
  va_start(values, format);
  vfprintf(file, format, values);
  va_end(values);
  fputc('\n', file);
}

static intptr_t next_handle(void) {
  static intptr_t handles = 1;
  return handles++;
}

/* Devices: as many H100s as NULL_GPU_COUNT says. */

static __thread int current_device;

cudaError_t cudaGetDeviceCount(int *count) {
  const char *given = getenv("NULL_GPU_COUNT");
  *count = given == NULL ? 1 : atoi(given);
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  *properties = (struct cudaDeviceProp){
      .name = "NVIDIA H100 80GB HBM3",
      .totalGlobalMem = DEVICE_BYTES,
      .sharedMemPerBlock = 49152,
      .sharedMemPerBlockOptin = 232448,
      .sharedMemPerMultiprocessor = 233472,
      .regsPerBlock = 65536,
      .regsPerMultiprocessor = 65536,
      .warpSize = 32,
      .maxThreadsPerBlock = 1024,
      .maxThreadsDim = {1024, 1024, 64},
      .maxGridSize = {2147483647, 65535, 65535},
      .maxThreadsPerMultiProcessor = 2048,
      .maxBlocksPerMultiProcessor = 32,
      .totalConstMem = 65536,
      .major = 9,
      .minor = 0,
      .multiProcessorCount = 132,
      .l2CacheSize = 50 << 20,
      .unifiedAddressing = 1,
      .concurrentKernels = 1,
      .asyncEngineCount = 3,
  };
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, device);
  switch (attribute) {
  case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
  case cudaDevAttrMaxSharedMemoryPerBlock: *value = properties.sharedMemPerBlock; break;
  case cudaDevAttrMaxRegistersPerBlock: *value = properties.regsPerBlock; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = properties.sharedMemPerBlockOptin; break;
  case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
  case cudaDevAttrWarpSize: *value = properties.warpSize; break;
  case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
  case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
  case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
  case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
  case cudaDevAttrClockRate: *value = 1980000; break;       /* kHz */
  case cudaDevAttrMemoryClockRate: *value = 2619000; break; /* kHz */
  case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
  default: *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
  snprintf(id, length, "0000:%02x:00.0", device);
  return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) { return "the null GPU knows no errors"; }

const char *cudaGetErrorName(cudaError_t error) { return "null GPU"; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
  *entry = dlsym(dlopen("libcuda.so.1", RTLD_LAZY), name);
  *found = *entry == NULL ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

/* Memory: address space, which becomes memory only where it is written. */

#define MOST_TAKEN 65536

static size_t taken;
static struct {
  char *start;
  size_t bytes;
} allocations[MOST_TAKEN];
static int allocated;

cudaError_t cudaMalloc(void **address, size_t bytes) {
  *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*address == MAP_FAILED || allocated == MOST_TAKEN)
    return cudaErrorMemoryAllocation;
  taken += bytes;
  allocations[allocated].start = *address;
  allocations[allocated++].bytes = bytes;
  return cudaSuccess;
}

int null_gpu_has(const void *address) {
  for (int i = 0; i < allocated; i++)
    if ((size_t)((const char *)address - allocations[i].start) < allocations[i].bytes)
      return 1;
  return 0;
}

cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
  *address = malloc(bytes);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void *address) {
  free(address);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
  *total = DEVICE_BYTES;
  *left = DEVICE_BYTES - taken;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  *attributes = (struct cudaPointerAttributes){.type = cudaMemoryTypeDevice, .devicePointer = (void *)address};
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  null_gpu_log("%s %p %p %p %zu", kind == cudaMemcpyDeviceToDevice ? "copy" : "transfer", (void *)stream, target,
               source, bytes);
  if (kind != cudaMemcpyDeviceToDevice || bytes < LARGE || null_gpu_computes())
    memmove(target, source, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind) {
  return cudaMemcpyAsync(target, source, bytes, kind, NULL);
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t stream) {
  null_gpu_log("fill %p %p %zu", (void *)stream, target, bytes);
  if (bytes < LARGE || null_gpu_computes())
    memset(target, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemset(void *target, int value, size_t bytes) { return cudaMemsetAsync(target, value, bytes, NULL); }

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) { return cudaMalloc(address, LARGE); }

/* Streams and events */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  *stream = (cudaStream_t)next_handle();
  null_gpu_log("stream %p %d", (void *)*stream, priority);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = (cudaEvent_t)next_handle();
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  null_gpu_log("record %p %p", (void *)stream, (void *)event);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  null_gpu_log("wait %p %p", (void *)stream, (void *)event);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = 1;
  return cudaSuccess;
}

/* Kernels */

typedef struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} Launch;

static __thread Launch pushed; /* by <<<...>>>, for the launch that follows */

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  pushed = (Launch){grid, block, shared, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *(void **)stream = pushed.stream;
  return cudaSuccess;
}

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  return &handle;
}

char __cudaInitModule(void **handle) { return 1; }

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
  null_gpu_log("kernel %p %p", (void *)stream, function);
  if (null_gpu_computes())
    null_gpu_gives_up("kernels of PyTorch's own");
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
  return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments, 0, config->stream);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  *attributes = (struct cudaFuncAttributes){
      .maxThreadsPerBlock = 1024, .numRegs = 32, .binaryVersion = 90, .ptxVersion = 90};
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                          size_t shared) {
  *blocks = 4;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared, unsigned flags) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}
