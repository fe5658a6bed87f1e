// y = x W^T in f32. x is [m][k] f32. Weights are widened in registers, once for up to six rows of x: that costs a sixth
// of the arithmetic's instructions and runs beside it, and memory is read as bf16 or int8. Included by linear.h.
#pragma once

// Where x[row][column] lies.
inline float* activations(char* x, int k, int row, int column) { return (float*)x + size_t(row) * k + column; }

// silu(c[0 .. 16)) * c[16 .. 32) to x[row][column ..].
inline void swiglu(const float* c, char* x, int k, int row, int column) {
  float* to = activations(x, k, row, column);
  for (int i = 0; i < 16; i += kLanes) store(to + i, mul(silu(load(c + i)), load(c + 16 + i)));
}

// How an int8 weight is kept, and where weight i of 64 (four k of 16 rows) is: row by row of each k.
struct Int8Code {
  static uint8_t of(int q) { return uint8_t(q); }
  static int place(int i) { return (i / 32 * 2 + i % 2) * 16 + i % 32 / 2; }
};

// Eight weights of a tile: of k = 2 * pair + odd, rows 8 * half and up.
struct Bf16Tile {
  static constexpr size_t kBytes = kTileBytes;
  static Vec get(const char* tile, int pair, bool odd, int half) {
    const __m256i pairs = _mm256_load_si256((const __m256i*)(tile + pair * 64 + half * 32));
    return odd ? odds(pairs) : evens(pairs);
  }
};
struct Int8Tile {
  static constexpr size_t kBytes = kTileBytes / 2;
  static Vec get(const char* tile, int pair, bool odd, int half) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)(tile + (2 * pair + odd) * 16 + half * 8));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
};

// An int8 tile as a bf16 tile.
inline void widen(const char* from, char* to) {
  for (int pair = 0; pair < 16; pair++)
    for (int half = 0; half < 2; half++) {
      const __m256i even = _mm256_castps_si256(Int8Tile::get(from, pair, false, half));
      const __m256i odd = _mm256_castps_si256(Int8Tile::get(from, pair, true, half));
      const __m256i both = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
      _mm256_store_si256((__m256i*)(to + pair * 64 + half * 32), both);
    }
}

// `R` rows of x with the first `V` times 8 rows of a block of W, to c [R][32]. `fetch(s)` is called before step s.
template <class Tile, int R, int V, class Fetch>
inline void rows_product(const float* x, size_t x_row, const char* w, int k_steps, float* c, Fetch fetch) {
  Vec sums[R][V];
  for (auto& row : sums)
    for (auto& sum : row) sum = zero();
  for (int s = 0; s < k_steps; s++, x += kTileK, w += 2 * Tile::kBytes) {
    fetch(s);
#pragma GCC unroll 2
    for (int pair = 0; pair < 16; pair++)
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; odd++) {
        Vec weights[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) weights[v] = Tile::get(w + v / 2 * Tile::kBytes, pair, odd, v % 2);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          const Vec a = _mm256_broadcast_ss(x + r * x_row + 2 * pair + odd);
#pragma GCC unroll 4
          for (int v = 0; v < V; v++) sums[r][v] = fma(a, weights[v], sums[r][v]);
        }
      }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(c + r * kBlockN + v * kLanes, sums[r][v]);
}

// Up to six rows with a whole block. Few rows take it at once, so that enough sums are under way; many in two halves,
// so that the sums stay in registers.
template <class Tile, class Fetch>
inline void block_product(int rows, const float* x, size_t x_row, const char* w, int k_steps, float* c, Fetch fetch) {
  const auto nothing = [](int) {};
  auto halves = [&]<int R>() {
    rows_product<Tile, R, 2>(x, x_row, w, k_steps, c, fetch);
    rows_product<Tile, R, 2>(x, x_row, w + Tile::kBytes, k_steps, c + 16, nothing);
  };
  switch (rows) {
    case 1: return rows_product<Tile, 1, 4>(x, x_row, w, k_steps, c, fetch);
    case 2: return rows_product<Tile, 2, 4>(x, x_row, w, k_steps, c, fetch);
    case 3: return rows_product<Tile, 3, 4>(x, x_row, w, k_steps, c, fetch);
    case 4: return halves.template operator()<4>();
    case 5: return halves.template operator()<5>();
    case 6: return halves.template operator()<6>();
  }
}

// All threads of a team: y = x W^T for `m` rows of x. `use(row, rows, block, c)` takes c [rows][32], columns in packed
// order; `wide` is room for one block in bf16 if W is int8. No barrier at the end.
template <bool Amx, class Use>
inline void multiply(Team& team, int thread, const Packed& w, const char* x, int m, char* wide, Use use) {
  static_assert(!Amx);
  constexpr size_t kAhead = 4096;
  constexpr int kMostRows = 6;
  alignas(64) float c[kMostRows * kBlockN];
  const int k_steps = w.k_steps, n_groups = (m + kMostRows - 1) / kMostRows;
  const size_t x_row = size_t(k_steps) * kTileK, block_bytes = w.block_bytes(), step_bytes = block_bytes / k_steps;
  const auto nothing = [](int) {};
  for (int b = thread; b < w.n_blocks;) {
    const int next = team.next_ticket();
    const char *here = w.block(b), *then = w.block(std::min(next, w.n_blocks - 1));
    // Fetch what the stream holds `kAhead` further on: the rest of this block, then the head of this thread's next.
    auto fetch = [&](int s) {
      const size_t at = s * step_bytes + kAhead;
      const char* p = at < block_bytes ? here + at : then + (at - block_bytes);
      for (size_t byte = 0; byte < step_bytes; byte += 64) _mm_prefetch(p + byte, _MM_HINT_T0);
    };
    if (w.int8 && n_groups > 1)
      for (int s = 0; s < k_steps; s++) {
        fetch(s);
        for (int t = 0; t < 2; t++) widen(here + (2 * s + t) * Int8Tile::kBytes, wide + (2 * s + t) * kTileBytes);
      }
    for (int group = 0, row = 0; group < n_groups; group++) {
      const int rows = (m - row) / (n_groups - group);  // as even as can be: six are the most
      const float* from = (const float*)x + row * x_row;
      if (w.int8 && n_groups > 1)
        block_product<Bf16Tile>(rows, from, x_row, wide, k_steps, c, nothing);
      else if (w.int8)
        block_product<Int8Tile>(rows, from, x_row, here, k_steps, c, fetch);
      else if (group == 0)
        block_product<Bf16Tile>(rows, from, x_row, here, k_steps, c, fetch);
      else
        block_product<Bf16Tile>(rows, from, x_row, here, k_steps, c, nothing);
      if (w.int8)
        for (int i = 0; i < rows * kBlockN; i += kLanes)
          store(c + i, mul(load(c + i), load(w.scales + kBlockN * b + i % kBlockN)));
      use(row, rows, b, c);
      row += rows;
    }
    b = next;
  }
}
