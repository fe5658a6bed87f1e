// y = x W^T in bf16 with AMX or vdpbf16ps. x comes as A tiles: [ceil(m / 16)][ceil(k / 32)][16][32]. int8 weights (sign
// and magnitude) become bf16 block by block in the cache, so the arithmetic is that of bf16. Included by linear.h.
#pragma once

inline bf16* a_tile_row(void* tiles, int k_steps, int row, int k_step) {
  return (bf16*)((char*)tiles + (size_t(row / 16) * k_steps + k_step) * kTileBytes + (row % 16) * 64);
}

// Where x[row][column] lies, column a multiple of 32.
inline bf16* activations(char* x, int k, int row, int column) { return a_tile_row(x, k / 32, row, column / 32); }

// silu(c[0 .. 16)) * c[16 .. 32) to x[row][column ..].
inline void swiglu(const float* c, char* x, int k, int row, int column) {
  __m512 y = _mm512_mul_ps(silu(_mm512_load_ps(c)), _mm512_load_ps(c + 16));
  bf16* to = a_tile_row(x, k / 32, row, column / 32) + column % 32;
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(y));
}

// How an int8 weight is kept, and where weight i of 64 is: unpack works inside 128-bit lanes.
struct Int8Code {
  static uint8_t of(int q) { return uint8_t(q < 0 ? 0x80 | -q : q); }
  static int place(int i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; }
};

// 64 weights of sign and magnitude to bf16. A table of 128 entries a byte is two registers; vpermi2b ignores bit 7.
struct Widener {
  __m512i low[2], high[2];

  Widener() {
    alignas(64) uint8_t bytes[2][128];
    for (int v = 0; v < 128; v++) {
      float f = float(v);
      uint32_t bits;
      memcpy(&bits, &f, 4);
      bytes[0][v] = uint8_t(bits >> 16);
      bytes[1][v] = uint8_t(bits >> 24);
    }
    for (int i = 0; i < 2; i++) {
      low[i] = _mm512_load_si512(bytes[0] + 64 * i);
      high[i] = _mm512_load_si512(bytes[1] + 64 * i);
    }
  }

  void operator()(const char* from, char* to) const {
    __m512i v = _mm512_loadu_si512(from);
    __m512i l = _mm512_permutex2var_epi8(low[0], v, low[1]), h = _mm512_permutex2var_epi8(high[0], v, high[1]);
    h = _mm512_ternarylogic_epi32(h, v, _mm512_set1_epi8(char(0x80)), 0xf8);  // h | (v & sign)
    _mm512_storeu_si512(to, _mm512_unpacklo_epi8(l, h));
    _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi8(l, h));
  }
};

// One block of weights with up to 32 rows of x (`a1` is null if 16 are enough): c [32][32]. `weights(s)` gives the two
// tiles of step s; it is called in order, one step ahead of use, so that fetching or widening overlaps.
template <bool Amx, class Weights>
inline void block_product(const char* a0, const char* a1, int k_steps, int rows, float* c, Weights weights) {
  if constexpr (Amx) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const char* b = weights(0);
    for (int s = 0; s < k_steps; s++) {
      const char* next = s + 1 < k_steps ? weights(s + 1) : nullptr;
      _tile_loadd(6, b, 64);
      _tile_loadd(4, a0 + size_t(s) * kTileBytes, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (a1) {
        _tile_loadd(5, a1 + size_t(s) * kTileBytes, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      b = next;
    }
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
    if (a1) {
      _tile_stored(2, c + 512, 128);
      _tile_stored(3, c + 528, 128);
    }
  } else {
    for (int r0 = 0; r0 < rows; r0 += 8) {
      const char* a = (r0 < 16 ? a0 : a1) + r0 % 16 * 64;
      __m512 sums[8][2];
      for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_ps();
      for (int s = 0; s < k_steps; s++) {
        const char* b = weights(s);
        for (int p = 0; p < 16; p++)
          for (int r = 0; r < 8; r++) {
            int32_t pair;
            memcpy(&pair, a + size_t(s) * kTileBytes + r * 64 + p * 4, 4);
            for (int t = 0; t < 2; t++)
              sums[r][t] = _mm512_dpbf16_ps(sums[r][t], (__m512bh)_mm512_loadu_si512(b + t * kTileBytes + p * 64),
                                            (__m512bh)_mm512_set1_epi32(pair));
          }
      }
      for (int r = 0; r < 8; r++)
        for (int t = 0; t < 2; t++) _mm512_store_ps(c + (r0 + r) * 32 + 16 * t, sums[r][t]);
    }
  }
}

// All threads of a team: y = x W^T for `m` rows of x. `use(row, rows, block, c)` takes c [32][32], columns in packed
// order; `wide` is room for one block in bf16 if W is int8. No barrier at the end.
template <bool Amx, class Use>
inline void multiply(Team& team, int thread, const Packed& w, const char* x, int m, char* wide, Use use) {
  constexpr size_t kAhead = 4096, kPair = 2 * kTileBytes;  // bytes; of the tiles of one step
  constexpr int kRing = 4;
  alignas(64) float c[32 * 32];
  const Widener widen;
  const int n_slabs = (m + 31) / 32, k_steps = w.k_steps;
  const size_t slab_bytes = size_t(k_steps) * kPair, block_bytes = w.block_bytes();
  // Widened weights are kept for the other rows of x; if there are none, in a corner of the first-level cache.
  const bool keep = n_slabs > 1 || (!Amx && m > 8);
  for (int b = thread; b < w.n_blocks;) {
    const int next = team.next_ticket();
    const char *here = w.block(b), *then = w.block(std::min(next, w.n_blocks - 1));
    // Fetch what the stream holds `kAhead` further on: the rest of this block, then the head of this thread's next.
    auto fetch = [&](size_t at, int lines) {
      at += kAhead;
      const char* p = at < block_bytes ? here + at : then + (at - block_bytes);
      for (int l = 0; l < lines; l++) _mm_prefetch(p + 64 * l, _MM_HINT_T0);
    };
    auto read = [&](int s) {
      fetch(s * kPair, 32);
      return here + s * kPair;
    };
    auto read_widened = [&](int s) {
      char* to = wide + (keep ? s : s % kRing) * kPair;
      const char* from = here + s * kPair / 2;
      fetch(s * kPair / 2, 16);
      for (size_t i = 0; i < kPair; i += 128) widen(from + i / 2, to + i);
      return (const char*)to;
    };
    auto again = [&](int s) { return (w.int8 ? wide : here) + s * kPair; };
    for (int slab = 0; slab < n_slabs; slab++) {
      const char* a0 = x + slab * slab_bytes;
      const int rows = std::min(32, m - 32 * slab);
      const char* a1 = rows > 16 ? a0 + slab_bytes / 2 : nullptr;
      if (slab > 0)
        block_product<Amx>(a0, a1, k_steps, rows, c, again);
      else if (w.int8)
        block_product<Amx>(a0, a1, k_steps, rows, c, read_widened);
      else
        block_product<Amx>(a0, a1, k_steps, rows, c, read);
      if (w.int8)
        for (int r = 0; r < rows; r++)
          for (int t = 0; t < 32; t += 16) {
            float* p = c + 32 * r + t;
            _mm512_store_ps(p, _mm512_mul_ps(_mm512_load_ps(p), _mm512_loadu_ps(w.scales + kBlockN * b + t)));
          }
      use(32 * slab, rows, b, c);
    }
    b = next;
  }
}
