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

// `R` rows of x with the first `V` times 8 rows of a block of W, to c [R][c_row]. `fetch(s)` is called before step s.
// R * V sums, V weights and one x are all the registers there are. Two pointers into x and its row length address any
// of six rows without arithmetic; a function of its own, since what surrounds it would take registers too.
template <class Tile, int R, int V, class Fetch>
[[gnu::noinline]] void rows_product(const float* x, size_t x_row, const char* w, int k_steps, float* c, size_t c_row,
                                    Fetch fetch) {
  Vec sums[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sums[r][v] = zero();
  const float* x3 = x + 3 * x_row;
  for (int s = 0; s < k_steps; s++, w += 2 * Tile::kBytes) {
    fetch(s);
#pragma GCC unroll 2
    for (int pair = 0; pair < 16; pair++, x += 2, x3 += 2)
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; odd++) {
        Vec weights[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) weights[v] = Tile::get(w + v / 2 * Tile::kBytes, pair, odd, v % 2);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          const Vec a = broadcast((r < 3 ? x + r * x_row : x3 + (r - 3) * x_row) + odd);
#pragma GCC unroll 4
          for (int v = 0; v < V; v++) sums[r][v] = fma(a, weights[v], sums[r][v]);
        }
      }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(c + r * c_row + v * kLanes, sums[r][v]);
}

// Up to six rows with a whole block. Few rows take it at once, so that enough sums are under way; many in two halves,
// so that the sums stay in registers.
template <class Tile, class Fetch>
inline void block_product(int rows, const float* x, size_t x_row, const char* w, int k_steps, float* c, size_t c_row,
                          Fetch fetch) {
  auto whole = [&]<int R>() { rows_product<Tile, R, 4>(x, x_row, w, k_steps, c, c_row, fetch); };
  auto halves = [&]<int R>() {
    rows_product<Tile, R, 2>(x, x_row, w, k_steps, c, c_row, fetch);
    rows_product<Tile, R, 2>(x, x_row, w + Tile::kBytes, k_steps, c + 16, c_row, [](int) {});
  };
  switch (rows) {
    case 1: return whole.template operator()<1>();
    case 2: return whole.template operator()<2>();
    case 3: return halves.template operator()<3>();
    case 4: return halves.template operator()<4>();
    case 5: return halves.template operator()<5>();
    case 6: return halves.template operator()<6>();
  }
}

// `use(first, rows)` for `m` rows in groups as even as can be, of at most kMostRows.
constexpr int kMostRows = 6;
template <class Use>
inline void in_groups(int m, Use use) {
  for (int row = 0, groups = (m + kMostRows - 1) / kMostRows; groups > 0; groups--) {
    const int rows = (m - row) / groups;
    use(row, rows);
    row += rows;
  }
}

// All threads of a team: y = x W^T for `m` rows of x. `use(row, rows, block, c)` takes c [rows][32], columns in packed
// order; `wide` is room for one block in bf16 if W is int8. No barrier at the end.
//
// x is taken in panels that stay in the second-level cache, a panel in groups of up to six rows. Of one group alone,
// a block of W is fetched just ahead of its use; of several, while the block before it is multiplied.
template <bool Amx, class Use>
inline void multiply(Team& team, int thread, const Packed& w, const char* x, int m, char* wide, Use use) {
  static_assert(!Amx);
  constexpr int kAheadBytes = 4096, kPanelBytes = 256 << 10;
  alignas(64) float c[kMostRows * kBlockN];
  const int k_steps = w.k_steps, block_bytes = int(w.block_bytes()), step_bytes = block_bytes / k_steps;
  const size_t x_row = size_t(k_steps) * kTileK;
  const int panel_groups = std::max(4, int(kPanelBytes / (kMostRows * x_row * 4)));
  const int n_panels = (m + panel_groups * kMostRows - 1) / (panel_groups * kMostRows), n_items = n_panels * w.n_blocks;
  auto first_row = [&](int panel) { return int(int64_t(m) * panel / n_panels); };
  for (int item = thread; item < n_items;) {
    const int panel = item / w.n_blocks, b = item % w.n_blocks, next = std::min(team.next_ticket(), n_items);
    const char *here = w.block(b), *then = w.block(next % w.n_blocks);
    const int end = first_row(panel + 1), n_groups = (end - first_row(panel) + kMostRows - 1) / kMostRows;
    int fetched = n_groups > 1 ? block_bytes : kAheadBytes;
    const int fetch_until = n_groups > 1 ? 2 * block_bytes : block_bytes + kAheadBytes;
    const int lines = (step_bytes / 64 + n_groups - 1) / n_groups;
    auto fetch = [&](int) {
      for (int i = 0; i < lines && fetched < fetch_until; i++, fetched += 64)
        _mm_prefetch(fetched < block_bytes ? here + fetched : then + (fetched - block_bytes), _MM_HINT_T1);
    };
    const bool widened = w.int8 && n_groups > 1;
    if (widened)
      for (int tile = 0; tile < 2 * k_steps; tile++) widen(here + tile * Int8Tile::kBytes, wide + tile * kTileBytes);
    in_groups(end - first_row(panel), [&](int at, int rows) {
      const int row = first_row(panel) + at;
      const float* from = (const float*)x + row * x_row;
      if (w.int8 && !widened)
        block_product<Int8Tile>(rows, from, x_row, here, k_steps, c, kBlockN, fetch);
      else
        block_product<Bf16Tile>(rows, from, x_row, widened ? wide : here, k_steps, c, kBlockN, fetch);
      if (w.int8)
        for (int i = 0; i < rows * kBlockN; i += kLanes)
          store(c + i, mul(load(c + i), load(w.scales + kBlockN * b + i % kBlockN)));
      use(row, rows, b, c);
    });
    item = next;
  }
}
