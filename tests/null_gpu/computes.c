/* What the null GPU computes, if asked to: products and collectives, as they are launched. Kernels it doesn't know. */
#include "computes.h"

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int null_gpu_computes(void) { return getenv("NULL_GPU_COMPUTES") != NULL; }

__attribute__((noreturn)) static void give_up(const char *why, int number) {
  fprintf(stderr, "the null GPU does not compute %s %d\n", why, number);
  abort();
}

void null_gpu_gives_up(const char *what) { give_up(what, 0); }

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
  case CUDA_R_32I:
    return ((const int32_t *)from)[at];
  case CUDA_R_64I:
    return ((const int64_t *)from)[at];
  case CUDA_R_8U:
    return ((const uint8_t *)from)[at];
  default:
    give_up("numbers of type", type);
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
  case CUDA_R_32I:
    ((int32_t *)to)[at] = wide;
    break;
  case CUDA_R_64I:
    ((int64_t *)to)[at] = wide;
    break;
  case CUDA_R_8U:
    ((uint8_t *)to)[at] = wide;
    break;
  default:
    give_up("numbers of type", type);
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
#define MOST_COMMUNICATORS 64

typedef struct {
  atomic_long arrivals;
  char sent[];
} Meeting;

static Meeting *meeting_of(const Communicator *communicator) {
  static const Communicator *known[MOST_COMMUNICATORS];
  static Meeting *meetings[MOST_COMMUNICATORS];
  int number = 0;
  while (known[number] != NULL && known[number] != communicator)
    if (++number == MOST_COMMUNICATORS)
      give_up("with communicators beyond", number);
  if (known[number] == NULL) {
    char path[4096];
    size_t bytes = sizeof(Meeting) + communicator->ranks * ROOM;
    snprintf(path, sizeof path, "%s/communicator%ld", getenv("NULL_GPU_COMPUTES"), communicator->id);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, bytes) != 0)
      give_up("without a file for communicator", number);
    meetings[number] = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    known[number] = communicator;
  }
  return meetings[number];
}

static void meet(Meeting *meeting, int ranks) {
  long before = atomic_fetch_add(&meeting->arrivals, 1);
  while (atomic_load(&meeting->arrivals) < (before / ranks + 1) * ranks)
    sched_yield();
}

static double reduced(const Meeting *meeting, int ranks, size_t at, cudaDataType type, int op) {
  double result = load(meeting->sent, at, type);
  for (int rank = 1; rank < ranks; rank++) {
    double value = load(meeting->sent + rank * ROOM, at, type);
    switch (op) {
    case 0: /* sum */
    case 4: /* average */
      result += value;
      break;
    case 2: /* maximum */
      result = value > result ? value : result;
      break;
    case 3: /* minimum */
      result = value < result ? value : result;
      break;
    default:
      give_up("reductions by operation", op);
    }
  }
  return op == 4 ? result / ranks : result;
}

void compute_collective(Collective which, const void *sent, void *received, size_t count, int type, int op,
                        const Communicator *communicator) {
  static const int ITEM_BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  static const cudaDataType TYPES[] = {CUDA_R_8I,  CUDA_R_8U,  CUDA_R_32I, CUDA_R_32U,  CUDA_R_64I, CUDA_R_64U,
                                       CUDA_R_16F, CUDA_R_32F, CUDA_R_64F, CUDA_R_16BF, -1,         -1};
  int ranks = communicator->ranks, rank = communicator->rank;
  size_t bytes = count * ITEM_BYTES[type], parts = which == GATHER || which == REDUCE ? 1 : ranks;
  Meeting *meeting = meeting_of(communicator);
  if (parts * bytes > ROOM)
    give_up("collectives of bytes", (int)(parts * bytes));
  memcpy(meeting->sent + rank * ROOM, sent, parts * bytes);
  meet(meeting, ranks);
  for (int each = 0; each < ranks && (which == GATHER || which == SWAP); each++)
    memcpy((char *)received + each * bytes, meeting->sent + each * ROOM + (which == SWAP ? rank * bytes : 0), bytes);
  for (size_t at = 0; at < count && (which == REDUCE || which == REDUCE_SCATTER); at++)
    store(received, at, TYPES[type],
          reduced(meeting, ranks, at + (which == REDUCE_SCATTER ? rank * count : 0), TYPES[type], op));
  meet(meeting, ranks); /* before another sends */
}
