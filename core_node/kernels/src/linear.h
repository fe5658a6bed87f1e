// y = x W^T with W packed once in the order in which it is read, so that a step reads weights as one stream.
//
// W [n, k] is cut into blocks of 32 rows; a block holds, for each 32 of k, two tiles of 16 rows. int8 weights have one
// scale a row; they are multiplied as they are, exactly since |w| <= 127, and the sum is scaled. In which order the
// weights of a tile lie in int8, and x, is for linear_*.h to say.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <vector>

#include "simd.h"
#include "team.h"

constexpr int kBlockN = 32;

// Memory that lives as long as the model, in huge pages where the system has them: the hardware's prefetcher and
// its page table buffer both stop at page borders.
class Arena {
 public:
  ~Arena() {
    for (void* slab : slabs_) free(slab);
  }

  void* take(size_t bytes) {
    bytes = round_up(bytes, 64);
    if (bytes > left_) {
      size_t slab_bytes = round_up(std::max(bytes, kSlab), kHugePage);
      void* slab = aligned_alloc(kHugePage, slab_bytes);
      if (!slab) throw std::bad_alloc();
      slabs_.push_back(slab);
      madvise(slab, slab_bytes, MADV_HUGEPAGE);
      memset(slab, 0, slab_bytes);
      next_ = (char*)slab;
      left_ = slab_bytes;
    }
    void* taken = next_;
    next_ += bytes;
    left_ -= bytes;
    return taken;
  }

 private:
  static constexpr size_t kSlab = 64u << 20, kHugePage = 2u << 20;
  std::vector<void*> slabs_;
  char* next_ = nullptr;
  size_t left_ = 0;
};

struct Packed {
  int n = 0, n_blocks = 0, k_steps = 0;
  bool int8 = false;
  char* data = nullptr;
  float* scales = nullptr;  // int8: one a packed row

  size_t block_bytes() const { return size_t(k_steps) * kTileBytes * (int8 ? 1 : 2); }
  const char* block(int b) const { return data + size_t(b) * block_bytes(); }
};

#ifdef __AVX512F__
#include "linear_avx512.h"
#else
#include "linear_avx2.h"
#endif

// `rows` bf16 [n, k]. `halves`: n is two halves, of which 16 rows each share a block (gate and up of a SwiGLU).
inline Packed pack(Arena& arena, const bf16* rows, int n, int k, bool int8, bool halves) {
  Packed w;
  const int half = n / 2;
  w.n = n;
  w.n_blocks = halves ? int(round_up(half, 16) / 16) : int(round_up(n, kBlockN) / kBlockN);
  w.k_steps = int(round_up(k, kTileK) / kTileK);
  w.int8 = int8;
  w.data = (char*)arena.take(w.block_bytes() * w.n_blocks);
  if (int8) w.scales = (float*)arena.take(size_t(w.n_blocks) * kBlockN * 4);
  for (int at = 0; at < w.n_blocks * kBlockN; at++) {
    const int b = at / kBlockN, tile = at % kBlockN / 16, column = at % 16;
    const int in_half = b * 16 + column;
    const int row = !halves ? at : in_half < half ? tile * half + in_half : n;
    if (row >= n) continue;  // padding stays zero
    const bf16* from = rows + size_t(row) * k;
    float scale = 0;
    if (int8) {
      for (int i = 0; i < k; i++) scale = std::max(scale, std::fabs(to_f32(from[i])));
      w.scales[at] = scale /= 127.f;
    }
    for (int i = 0; i < k; i++) {
      const size_t tile_at = ((size_t(b) * w.k_steps + i / kTileK) * 2 + tile) * 512;
      const size_t to = tile_at + size_t(i % kTileK / 2) * 32 + column * 2 + i % 2;
      if (int8) {
        int q = scale > 0 ? int(std::lrintf(to_f32(from[i]) / scale)) : 0;
        ((uint8_t*)w.data)[to / 64 * 64 + Int8Code::place(int(to % 64))] = Int8Code::of(q);
      } else
        ((bf16*)w.data)[to] = from[i];
    }
  }
  return w;
}
