/* What the null GPU computes, if asked to: products and collectives, as they are launched. Kernels it doesn't know. */
#include "computes.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int null_gpu_computes(void) { return getenv("NULL_GPU_COMPUTES") != NULL; }

void null_gpu_gives_up(const char *what, ...) {
  va_list arguments;
  va_start(arguments, what);
  fputs("the null GPU does not compute ", stderr);
  vfprintf(stderr, what, arguments);
  fputs("\n", stderr);
  abort();
}

static double load(const void *from, size_t at, cudaDataType type) {
  float value;
  uint32_t bits;
  switch (type) {
  case CUDA_R_32F:
    return ((const float *)from)[at];
  case CUDA_R_16BF:
    bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    memcpy(&value, &bits, sizeof bits);
    return value;
  default:
    null_gpu_gives_up("numbers of type %d", type);
  }
}

static void store(void *to, size_t at, cudaDataType type, double wide) {
  float value = wide;
  uint32_t bits;
  switch (type) {
  case CUDA_R_32F:
    ((float *)to)[at] = value;
    break;
  case CUDA_R_16BF: /* the nearest, of two equally near the even one */
    memcpy(&bits, &value, sizeof bits);
    ((uint16_t *)to)[at] = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    break;
  default:
    null_gpu_gives_up("numbers of type %d", type);
  }
}

static double element(Matrix matrix, size_t row, size_t column) {
  return load(matrix.start, matrix.turned ? column + row * matrix.stride : row + column * matrix.stride, matrix.type);
}

void compute_product(Matrix a, Matrix b, Matrix c, int m, int n, int k, float alpha, float beta) {
  for (int row = 0; row < m; row++)
    for (int column = 0; column < n; column++) {
      double sum = beta == 0 ? 0 : beta * element(c, row, column);
      for (int each = 0; each < k; each++)
        sum += alpha * element(a, row, each) * element(b, each, column);
      store((void *)c.start, row + (size_t)column * c.stride, c.type, sum);
    }
}

/* Ranks meet in a file, which has room for what each one sends. */

#define ROOM ((size_t)16 << 20)

enum { NCCL_FLOAT = 7, NCCL_BFLOAT16 = 9, NCCL_SUM = 0, NCCL_AVERAGE = 4 };

typedef struct {
  atomic_long arrivals;
  char sent[];
} Meeting;

static Meeting *meeting_of(Communicator *communicator) {
  if (communicator->meeting == NULL) {
    char path[4096];
    size_t bytes = sizeof(Meeting) + communicator->ranks * ROOM;
    snprintf(path, sizeof path, "%s/communicator%ld", getenv("NULL_GPU_COMPUTES"), communicator->id);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, bytes) != 0)
      null_gpu_gives_up("without a file to meet in: %s", strerror(errno));
    communicator->meeting = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  return communicator->meeting;
}

static void meet(Meeting *meeting, int ranks) {
  long before = atomic_fetch_add(&meeting->arrivals, 1);
  while (atomic_load(&meeting->arrivals) < (before / ranks + 1) * ranks)
    sched_yield();
}

static double sum(const Meeting *meeting, int ranks, size_t at, cudaDataType type) {
  double result = 0;
  for (int rank = 0; rank < ranks; rank++)
    result += load(meeting->sent + rank * ROOM, at, type);
  return result;
}

void compute_collective(Collective which, const void *sent, void *received, size_t bytes, size_t count, int type,
                        int op, Communicator *communicator) {
  int ranks = communicator->ranks, rank = communicator->rank;
  size_t parts = which == GATHER || which == REDUCE ? 1 : ranks;
  Meeting *meeting = meeting_of(communicator);
  if (parts * bytes > ROOM)
    null_gpu_gives_up("collectives of %zu bytes from a rank", parts * bytes);
  memcpy(meeting->sent + rank * ROOM, sent, parts * bytes);
  meet(meeting, ranks);
  if (which == GATHER || which == SWAP)
    for (int each = 0; each < ranks; each++)
      memcpy((char *)received + each * bytes, meeting->sent + each * ROOM + (which == SWAP ? rank * bytes : 0), bytes);
  else {
    cudaDataType number = type == NCCL_FLOAT ? CUDA_R_32F : type == NCCL_BFLOAT16 ? CUDA_R_16BF : -1;
    size_t first = which == REDUCE_SCATTER ? rank * count : 0;
    if (op != NCCL_SUM && op != NCCL_AVERAGE)
      null_gpu_gives_up("reductions by operation %d", op);
    for (size_t at = 0; at < count; at++)
      store(received, at, number, sum(meeting, ranks, first + at, number) / (op == NCCL_AVERAGE ? ranks : 1));
  }
  meet(meeting, ranks); /* before another sends */
}
