// Causal attention for CPUs, forward and backward, on the product of x with the QKV matrix as it lies in memory.
//
// qkv is (B, T, 3, H, D), contiguous: B examples, T times, H heads of size D. The output is (B, T, H, D), the gradient has the
// shape of qkv, so nothing is transposed or copied around the kernel. attention_autograd.cpp calls the two entry points at the
// bottom. No torch headers.
//
// Forward:  S = Q K^T / sqrt(D),  P = softmax over the keys up to the query's own time,  O = P V
//           lse_i = sqrt(D) log(sum_j exp(S_ij)), all that is kept of S and P. In units of Q K^T, so that the largest weight's
//           exponent comes out of a difference that is exact
// Backward: P = exp(S - lse) once more,  delta_i = sum_d dO_id O_id,  dS = P * (dO V^T - delta)
//           dV = P^T dO,  dQ = dS K / sqrt(D),  dK = dS^T Q / sqrt(D)
// Cosine attention: rows of Q and K are first divided by their root mean square.
//
// Matrices of scores are kept transposed, a row for a key and a lane for a query: what belongs to a query (maximum, sum, lse,
// delta) is then a vector, and no sum goes across lanes. Every product is a sum over steps of (a word of each of kRows rows)
// times (kVecs vectors of words). A word is a float or, where the CPU multiplies bf16 (vdpbf16ps), a pair of bf16 that follow
// each other along the sum. A head's matrices are packed into words once, in the orders that the products need:
//   rows    (T, words along D), for sums over D          times   (words along T, D), for sums over T
// padded with zeros to whole tiles, so that no product has a remainder, and laid out in panels: the words of one step of one
// tile lie side by side, those of the next step behind them. For floats rows and times are the same.
//
// Threads: forward work is cut into (head, block of queries), backward into (head, block of keys), and each thread owns one
// contiguous range of equal work. dQ of a head that is cut between threads is added up afterwards, in their order. So it
// depends on the number of threads, never on timing; all else depends on neither. A thread's scratch memory is a head's packed
// matrices and dQ, 18 bytes for each number of a head's queries in bf16 and 32 in float32.

#include <algorithm>
#include <cmath>
#include <utility>

#include "vec.h"

namespace {

#if defined(__AVX512F__)
constexpr int kRows = 8;
#else
constexpr int kRows = 4;
#endif
constexpr int kVecs = 2, kLanes = kVecs * W;   // a tile of scores: kRows keys, kLanes queries
constexpr int kMaxSize = 256;                  // of a head

// Blocks, in keys and queries: multiples of kLanes such that a block's scores stay in L1 and its words in L2.
constexpr int64_t kForwardKeys = 128, kBackwardKeys = 64, kBackwardQueries = 128;

// ---- vectors

// The first n of W, or all if there are more.
template <class X> INLINE vec load_some(const X* p, int64_t n) {
    if (n >= W) return load(p);
    X some[W] = {};
    if (n > 0) std::memcpy(some, p, n * sizeof(X));
    return load(some);
}

template <class X> INLINE void store_some(X* p, vec v, int64_t n) {
    if (n >= W) return store(p, v);
    X some[W];
    store(some, v);
    std::memcpy(p, some, n * sizeof(X));
}

INLINE vec splat(float x) {
#if defined(__AVX512F__)
    return bit_cast<vec>(_mm512_set1_ps(x));
#else
    vec v;
    for (int i = 0; i < W; ++i) v[i] = x;
    return v;
#endif
}

// A NaN in b comes through.
INLINE vec maximum(vec a, vec b) {
#if defined(__AVX512F__)
    return bit_cast<vec>(_mm512_max_ps(bit_cast<__m512>(a), bit_cast<__m512>(b)));
#elif defined(__AVX__)
    return bit_cast<vec>(_mm256_max_ps(bit_cast<__m256>(a), bit_cast<__m256>(b)));
#else
    return a > b ? a : b;
#endif
}

// 2^x for x < 128, 0 below 2^-100; a NaN stays one. x = n + f, |f| <= 1/2, and a minimax polynomial for 2^f, off by 2e-9 of it
// or, where bf16 comes of it, by 1e-7.
template <bool exact = true> INLINE vec exp2(vec x) {
    constexpr float to_integer = 12582912.f;   // 1.5 * 2^23: adding it leaves n in the last bits
    const vec shifted = x + to_integer, f = x - (shifted - to_integer);
    vec y;
    if constexpr (exact) {
        y = f * 0.00015353361959569156f + 0.0013398875016719103f;
        y = y * f + 0.00961843691766262f;
        y = y * f + 0.055503323674201965f;
        y = y * f + 0.24022647738456726f;
        y = y * f + 0.6931471824645996f;
    } else {
        y = f * 0.001326472731307149f + 0.009671512991189957f;
        y = y * f + 0.05550733581185341f;
        y = y * f + 0.24022242426872253f;
        y = y * f + 0.6931470036506653f;
    }
    y = y * f + 1.f;
    const vec_u32 bits = bit_cast<vec_u32>(y) + (bit_cast<vec_u32>(shifted) << 23);
#if defined(__AVX512F__)
    const __mmask16 keep = _mm512_cmp_ps_mask(bit_cast<__m512>(x), _mm512_set1_ps(-100.f), _CMP_NLT_UQ);
    return bit_cast<vec>(_mm512_maskz_mov_epi32(keep, bit_cast<__m512i>(bits)));
#else
    return bit_cast<vec>(bits & ~bit_cast<vec_u32>(x < -100.f));
#endif
}

// For x from 1 up: a guess from the bits, off by 0.05, then twice Newton's method of third order.
INLINE vec log2(vec x) {
    const vec_u32 bits = bit_cast<vec_u32>(x);
    vec y = __builtin_convertvector(bit_cast<vec_i32>(bits) - 0x3f800000, vec) * (1.f / (1 << 23)) + 0.04f;
    for (int i = 0; i < 2; ++i) {
        const vec e = x * exp2(-y) - 1.f;
        y += e * (1.4426950408889634f + e * (-0.7213475204444817f + e * 0.480898346962988f));
    }
    return y;
}

// ---- transposition of W x W words, in log2(W) rounds of exchanging blocks across the diagonal

template <int S, bool High, int... I> INLINE vec exchange(vec a, vec b, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, (High ? (I & S ? W + I : I + S) : (I & S ? W + I - S : I))...);
#else
    return __builtin_shuffle(a, b, vec_i32{(High ? (I & S ? W + I : I + S) : (I & S ? W + I - S : I))...});
#endif
}

template <int S = 1> INLINE void transpose(vec (&v)[W]) {
    if constexpr (S < W) {
#pragma GCC unroll 16
        for (int r = 0; r < W; ++r) {
            if (r & S) continue;
            const vec a = v[r], b = v[r + S];
            v[r] = exchange<S, false>(a, b, std::make_integer_sequence<int, W>());
            v[r + S] = exchange<S, true>(a, b, std::make_integer_sequence<int, W>());
        }
        transpose<2 * S>(v);
    }
}

// ---- words

// One head's rows of q, k, v or of the output: T rows of D, `stride` apart.
template <class X> struct Rows {
    X* p;
    int64_t stride, T, D;
    X* row(int64_t t) const { return p + t * stride; }
};

// Rows of a head lie far apart, and no hardware fetches them ahead: those of the next head are asked for during the work on
// this one: 0.88 of the forward pass's time without it (12 x 256, 6 heads of 64, bf16, one thread of Zen 4).
template <class X> INLINE void prefetch(Rows<X> x, int64_t from, int64_t to) {
    for (int64_t t = from; t < std::min(to, x.T); ++t)
        for (int64_t d = 0; d < x.D; d += 64 / sizeof(X)) __builtin_prefetch(x.row(t) + d, 0, 2);
}

struct Floats {
    static constexpr int kPer = 1;   // numbers in a word

    static INLINE vec multiply_add(vec a, vec b, vec sum) { return a * b + sum; }

    template <class X> static INLINE vec load_rows(Rows<const X> x, int64_t t, int64_t word) {
        return t < x.T ? load_some(x.row(t) + word, x.D - word) : vec{};
    }
    template <class X> static INLINE vec load_times(Rows<const X> x, int64_t t, int64_t d) { return load_rows(x, t, d); }

    // two keys' rows as words along the keys
    static INLINE void store_times(float* to, const vec (&two)[2][kVecs]) {
#pragma GCC unroll 2
        for (int r = 0; r < 2; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; ++v) store(to + r * kLanes + v * W, two[r][v]);
    }

    // a tile as words along the queries and, at `times` unless it is null, along the keys
    static INLINE void store_tile(float* to, float*, const vec (&tile)[kRows][kVecs]) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; ++v) store(to + r * kLanes + v * W, tile[r][v]);
    }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
struct Pairs {
    static constexpr int kPer = 2;

    static INLINE vec multiply_add(vec a, vec b, vec sum) {
        return bit_cast<vec>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(a), bit_cast<__m512bh>(b)));
    }

    static INLINE vec load_rows(Rows<const bf16> x, int64_t t, int64_t word) {
        const int64_t n = x.D - 2 * word;
        if (t >= x.T || n <= 0) return vec{};
        const bf16* const p = x.row(t) + 2 * word;
        if (n >= 2 * W) return load(reinterpret_cast<const float*>(p));
        float some[W] = {};
        std::memcpy(some, p, n * sizeof(bf16));
        return load(some);
    }

    static INLINE vec load_times(Rows<const bf16> x, int64_t t, int64_t d) {
        vec_u32 both{};
        for (int i = 0; i < 2; ++i)
            if (2 * t + i < x.T) {
                const vec_u32 one = bit_cast<vec_u32>(load_some(x.row(2 * t + i) + d, x.D - d));   // in the upper half
                both |= i ? one : one >> 16;
            }
        return bit_cast<vec>(both);
    }

    // a row's numbers, in order
    static INLINE __m512i rounded(const vec (&row)[kVecs]) {
        return bit_cast<__m512i>(_mm512_cvtne2ps_pbh(bit_cast<__m512>(row[1]), bit_cast<__m512>(row[0])));
    }

    static INLINE void store_zipped(float* to, __m512i first, __m512i second) {
        static constexpr uint16_t zip[] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                           8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
        const __m512i low = _mm512_loadu_si512(zip), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(first, low, second));
        _mm512_storeu_si512(to + W, _mm512_permutex2var_epi16(first, high, second));
    }

    static INLINE void store_times(float* to, const vec (&two)[2][kVecs]) {
        store_zipped(to, rounded(two[0]), rounded(two[1]));
    }

    static INLINE void store_tile(float* to, float* times, const vec (&tile)[kRows][kVecs]) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r += 2) {
            const __m512i first = rounded(tile[r]), second = rounded(tile[r + 1]);
            _mm512_storeu_si512(to + r * W, first);
            _mm512_storeu_si512(to + (r + 1) * W, second);
            if (times) store_zipped(times + r / 2 * kLanes, first, second);
        }
    }
};
#endif

template <class X> struct WordsOf { using type = Floats; };
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <> struct WordsOf<bf16> { using type = Pairs; };
#endif

// A packed operand is a matrix (steps, n) in panels of `width` columns: (n / width, steps, width).
template <int width> INLINE void store_panel(float* to, int64_t steps, int64_t step, int64_t n, vec v) {
    static_assert(width % W == 0 || W % width == 0, "panels and vectors do not fit");
    if constexpr (width >= W) {
        store(to + (n / width * steps + step) * width + n % width, v);
    } else {
        for (int i = 0; i < W; i += width)
            std::memcpy(to + ((n + i) / width * steps + step) * width, (float*)&v + i, width * sizeof(float));
    }
}

// Of `rows`: n is the time. load(t, word) yields W words.
template <int width, class Load> void pack_rows(int64_t T, int64_t words, float* to, Load load) {
    for (int64_t t = 0; t < T; t += W)
        for (int64_t word = 0; word < words; word += W) {
            vec v[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) v[i] = load(t + i, word);
            transpose(v);
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i)
                if (word + i < words) store_panel<width>(to, words, word + i, t, v[i]);
        }
}

// Of `times`: n is the channel. load(word, d) yields W words. width 0: one panel of all channels.
template <int width, class Load> void pack_times(int64_t words, int64_t D, float* to, Load load) {
    for (int64_t word = 0; word < words; ++word)
        for (int64_t d = 0; d < D; d += W) {
            if constexpr (width) store_panel<width>(to, words, word, d, load(word, d));
            else store(to + word * D + d, load(word, d));
        }
}

// ---- the product of a tile: sum += a b over `steps` words. a: word s of row r at r * row + s * step; b: `stride` words a step

template <class Words, int V>
INLINE void multiply(const float* a, int64_t row, int64_t step, const float* b, int64_t stride, int64_t steps,
                     vec (&sum)[kRows][V]) {
    for (int64_t s = 0; s < steps; ++s, a += step, b += stride) {
        vec column[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) column[v] = load(b + v * W);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            const vec one = splat(a[r * row]);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = Words::multiply_add(one, column[v], sum[r][v]);
        }
    }
}

template <int V> INLINE void add_to(float* to, int64_t stride, const vec (&sum)[kRows][V]) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) store(to + r * stride + v * W, load(to + r * stride + v * W) + sum[r][v]);
}

// ---- a problem, its heads, and its scratch memory

template <class X> struct Problem {
    const X* qkv;
    float* lse;             // (B, H, T)
    X* out;                 // written in forward, read in backward
    const X* dout;          // backward alone
    X* dqkv;
    int64_t B, T, H, D;
    float eps;              // of cosine attention; negative: none

    int64_t heads() const { return B * H; }
    float scale() const { return 1 / std::sqrt(float(D)); }
    float scale2() const { return 1.4426950408889634f * scale(); }   // for powers of 2

    template <class Y> Rows<Y> of_qkv(Y* p, int64_t head, int which) const {
        return {p + (head / H * T * 3 + which) * H * D + head % H * D, 3 * H * D, T, D};
    }
    template <class Y> Rows<Y> of_out(Y* p, int64_t head) const {
        return {p + head / H * T * H * D + head % H * D, H * D, T, D};
    }
};

// Sizes of a head's packed matrices.
template <class Words> struct Sizes {
    int64_t T, D, words, times;   // padded T and D, words along D and T
    template <class X> explicit Sizes(const Problem<X>& a)
        : T(round_up(a.T, kLanes)), D(round_up(a.D, kRows > W ? kRows : W)), words((a.D + Words::kPer - 1) / Words::kPer),
          times(T / Words::kPer) {}
};

// Hands out parts of one block. Block and parts begin at cache lines: a vector across the border of two takes twice as long.
struct Memory {
    char* next;
    template <class Y = float> Y* take(int64_t n) {
        char* const p = next;
        next += round_up(n * sizeof(Y), 64);
        return reinterpret_cast<Y*>(p);
    }
};

// Queries or keys as attention sees them: as they lie or, in cosine attention, divided by their root mean square, in a copy.
template <class X> struct Seen {
    X* copy;
    float* factor;
    Rows<const X> rows;

    Seen(const Problem<X>& a, Memory& memory) : copy(memory.take<X>(a.eps < 0 ? 0 : a.T * a.D)),
                                                factor(memory.take(a.eps < 0 ? 0 : a.T)) {}

    void look_at(const Problem<X>& a, int64_t head, int which) {
        rows = a.of_qkv(a.qkv, head, which);
        if (a.eps < 0) return;
        for (int64_t t = 0; t < a.T; ++t) {
            const X* const row = rows.row(t);
            vec squares{};
            for (int64_t d = 0; d < a.D; d += W) squares += load_some(row + d, a.D - d) * load_some(row + d, a.D - d);
            factor[t] = 1 / std::sqrt(sum_of_lanes(squares) / a.D + a.eps);
            for (int64_t d = 0; d < a.D; d += W)
                store_some(copy + t * a.D + d, load_some(row + d, a.D - d) * factor[t], a.D - d);
        }
        rows = {copy, a.D, a.T, a.D};
    }

    // row: the gradient g of row t of what is seen, D floats, to that of q or k. seen = x f: dx = f (g - seen mean(g seen))
    void store_gradient(const Problem<X>& a, float* row, int64_t t, X* to) const {
        float scale = a.scale();
        if (a.eps >= 0) {
            const X* const seen = rows.row(t);
            vec products{};
            for (int64_t d = 0; d < a.D; d += W) products += load(row + d) * load_some(seen + d, a.D - d);
            const float mean = sum_of_lanes(products) / a.D;
            for (int64_t d = 0; d < a.D; d += W) store(row + d, load(row + d) - load_some(seen + d, a.D - d) * mean);
            scale *= factor[t];
        }
        for (int64_t d = 0; d < a.D; d += W) store_some(to + d, load(row + d) * scale, a.D - d);
    }

    static float sum_of_lanes(vec v) {
        float sum = 0;
        for (int i = 0; i < W; ++i) sum += v[i];
        return sum;
    }
};

// Columns of a tile (D, kLanes) as rows in memory: row(time in the tile, D floats).
template <class F> INLINE void for_each_column(const float* tile, int64_t D, int64_t columns, F row) {
    float buffer[W][kMaxSize];
    for (int64_t i = 0; i < columns; i += W) {
        for (int64_t d = 0; d < D; d += W) {
            vec v[W];
#pragma GCC unroll 16
            for (int r = 0; r < W; ++r) v[r] = load(tile + (d + r) * kLanes + i);
            transpose(v);
#pragma GCC unroll 16
            for (int r = 0; r < W; ++r) store(buffer[r] + d, v[r]);
        }
        for (int r = 0; r < W && i + r < columns; ++r) row(i + r, buffer[r]);
    }
}

// ---- threads

// Who does what: a head has blocks of weight 1, 2, 3 ... (or the other way round); all heads' blocks in one line are cut into
// equal shares.
struct Shares {
    int64_t heads, blocks, threads;
    bool rising;

    int64_t sum(int64_t n) const { return n * (n + 1) / 2; }
    int owner(int64_t head, int64_t block) const {
        const int64_t earlier = rising ? sum(block) : sum(blocks) - sum(blocks - block);
        return int((head * sum(blocks) + earlier) * threads / (heads * sum(blocks)));
    }
    bool takes_part(int thread, int64_t head) const { return owner(head, 0) <= thread && thread <= owner(head, blocks - 1); }
    bool is_cut(int64_t head) const { return owner(head, 0) != owner(head, blocks - 1); }
};

// ---- forward

// Lanes whose query is not before key j; first: the time of the first lane.
INLINE vec_i32 sees(int64_t first, int64_t j) {
    vec_i32 lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    return lane >= int32_t(j - first);
}

INLINE vec choose(vec_i32 mask, vec a, vec b) {
    return bit_cast<vec>((bit_cast<vec_i32>(a) & mask) | (bit_cast<vec_i32>(b) & ~mask));
}

template <class X> struct Forward {
    using Words = typename WordsOf<X>::type;
    const Problem<X> a;
    const Sizes<Words> size;
    Memory memory;
    Seen<X> q, k;
    float *q_panels, *k_panels, *v_panels, *s, *o;

    Forward(const Problem<X>& a, char* begin) : a(a), size(a), memory{begin}, q(a, memory), k(a, memory) {
        q_panels = memory.take(size.T * size.words);
        k_panels = memory.take(size.T * size.words);
        v_panels = memory.take(size.times * size.D);
        s = memory.take(kForwardKeys * kLanes);
        o = memory.take(size.D * kLanes);
    }

    void pack(int64_t head) {
        q.look_at(a, head, 0), k.look_at(a, head, 1);
        const Rows<const X> v = a.of_qkv(a.qkv, head, 2);
        pack_rows<kLanes>(size.T, size.words, q_panels, [&](auto t, auto word) { return Words::load_rows(q.rows, t, word); });
        pack_rows<kRows>(size.T, size.words, k_panels, [&](auto t, auto word) { return Words::load_rows(k.rows, t, word); });
        pack_times<kRows>(size.times, size.D, v_panels, [&](auto t, auto d) { return Words::load_times(v, t, d); });
    }

    // Scores of the keys from j0, before scaling, for the kLanes queries from i0, and their maxima.
    void scores(int64_t i0, int64_t j0, int64_t keys, vec (&most)[kVecs]) {
        const vec none = splat(-INFINITY);
        for (int v = 0; v < kVecs; ++v) most[v] = none;
        for (int64_t j = 0; j < keys; j += kRows) {
            vec tile[kRows][kVecs] = {};
            multiply<Words>(k_panels + (j0 + j) * size.words, 1, kRows, q_panels + i0 * size.words, kLanes, size.words, tile);
            if (j0 + j + kRows > i0)   // not every lane sees every key
                for (int r = 0; r < kRows; ++r)
                    for (int v = 0; v < kVecs; ++v) tile[r][v] = choose(sees(i0 + v * W, j0 + j + r), tile[r][v], none);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < kVecs; ++v) {
                    store(s + (j + r) * kLanes + v * W, tile[r][v]);
                    most[v] = maximum(most[v], tile[r][v]);
                }
        }
    }

    // Scores to powers of two, as words along the keys, in place; sum += their sums.
    void powers(int64_t keys, const vec (&most)[kVecs], vec (&sum)[kVecs]) {
        constexpr auto power = exp2<Words::kPer == 1>;
        const float scale2 = a.scale2();
        float *from = s, *to = s;
        for (int64_t j = 0; j < keys; j += 2, from += 2 * kLanes, to += 2 / Words::kPer * kLanes) {
            vec p[2][kVecs];
#pragma GCC unroll 2
            for (int r = 0; r < 2; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < kVecs; ++v) p[r][v] = power((load(from + r * kLanes + v * W) - most[v]) * scale2);
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; ++v) sum[v] += p[0][v] + p[1][v];
            Words::store_times(to, p);
        }
    }

    // o = o * shrink + V^T P for the keys from j0
    void output(int64_t j0, int64_t keys, bool first, const vec (&shrink)[kVecs]) {
        for (int64_t d = 0; d < size.D; d += kRows) {
            vec tile[kRows][kVecs] = {};
            multiply<Words>(v_panels + d * size.times + j0 / Words::kPer * kRows, 1, kRows, s, kLanes, keys / Words::kPer,
                            tile);
            float* const to = o + d * kLanes;
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < kVecs; ++v) {
                    float* const p = to + r * kLanes + v * W;
                    store(p, first ? tile[r][v] : load(p) * shrink[v] + tile[r][v]);
                }
        }
    }

    void queries(int64_t head, int64_t i0) {
        for (int which = 0; which < 3 && head + 1 < a.heads(); ++which)
            prefetch(a.of_qkv(a.qkv, head + 1, which), i0, i0 + kLanes);
        const int64_t end = i0 + kLanes, rows = std::min<int64_t>(kLanes, a.T - i0);
        vec most[kVecs] = {}, sum[kVecs] = {}, shrink[kVecs] = {};
        for (int64_t j0 = 0; j0 < end; j0 += kForwardKeys) {
            const int64_t keys = std::min(kForwardKeys, end - j0);
            vec here[kVecs];
            scores(i0, j0, keys, here);
            for (int v = 0; v < kVecs; ++v) {
                const vec before = most[v];
                most[v] = j0 ? maximum(before, here[v]) : here[v];
                shrink[v] = j0 ? exp2((before - most[v]) * a.scale2()) : vec{};
                sum[v] *= shrink[v];
            }
            powers(keys, most, sum);
            output(j0, keys, j0 == 0, shrink);
        }
        float* const lse = a.lse + head * a.T + i0;
        for (int v = 0; v < kVecs; ++v) {
            if (v * W < rows) store_some(lse + v * W, most[v] + log2(sum[v]) * (1 / a.scale2()), rows - v * W);
            const vec factor = 1.f / sum[v];
            for (int64_t d = 0; d < size.D; ++d) store(o + d * kLanes + v * W, load(o + d * kLanes + v * W) * factor);
        }
        const Rows<X> out = a.of_out(a.out, head);
        for_each_column(o, size.D, rows, [&](int64_t i, const float* row) {
            for (int64_t d = 0; d < a.D; d += W) store_some(out.row(i0 + i) + d, load(row + d), a.D - d);
        });
    }

    static int64_t bytes(const Problem<X>& a, int) { return Forward(a, nullptr).memory.next - (char*)nullptr; }

    static void run(const Problem<X>& a, char* scratch, int threads) {
        on_threads(threads, [&](int thread, int n) {
            Forward f(a, scratch + thread * bytes(a, threads));
            const Shares shares{a.heads(), f.size.T / kLanes, n, true};
            for (int64_t head = 0; head < shares.heads; ++head) {
                if (!shares.takes_part(thread, head)) continue;
                f.pack(head);
                for (int64_t i = 0; i < shares.blocks; ++i)
                    if (shares.owner(head, i) == thread) f.queries(head, i * kLanes);
            }
        });
    }
};

// ---- backward

template <class X> struct Backward {
    using Words = typename WordsOf<X>::type;
    static constexpr int64_t kTileWords = kLanes / Words::kPer;   // along a tile's row
    const Problem<X> a;
    const Sizes<Words> size;
    Memory memory;
    Seen<X> q, k;
    float *q_panels, *dout_panels, *q_times, *dout_times, *k_panels, *v_panels, *k_times;   // as the products need them
    float *lse, *delta;             // padded
    float *p, *ds, *ds_times;       // of a block: (tiles of queries, keys, words along queries), (.., words along keys, ..)
    float *dk, *dv;                 // of a block of keys: (keys, D)
    float *dq, *dq_shared;          // of a head: (tiles of queries, D, kLanes); the second: of one that an earlier thread began

    Backward(const Problem<X>& a, char* begin, int threads) : a(a), size(a), memory{begin}, q(a, memory), k(a, memory) {
        const int64_t of_words = size.T * size.words, of_times = size.times * size.D, block = kBackwardQueries * kBackwardKeys;
        for (float** to : {&q_panels, &dout_panels, &k_panels, &v_panels}) *to = memory.take(of_words);
        for (float** to : {&q_times, &dout_times, &k_times}) *to = memory.take(of_times);
        for (float** to : {&lse, &delta}) *to = memory.take(size.T);
        for (float** to : {&p, &ds}) *to = memory.take(block / Words::kPer);
        ds_times = Words::kPer == 1 ? ds : memory.take(block / Words::kPer);
        for (float** to : {&dk, &dv}) *to = memory.take(kBackwardKeys * size.D);
        dq = memory.take(size.T * size.D);
        dq_shared = memory.take(a.heads() % threads ? size.T * size.D : 0);   // otherwise no head is cut
    }

    void pack(int64_t head) {
        q.look_at(a, head, 0), k.look_at(a, head, 1);
        const Rows<const X> v = a.of_qkv(a.qkv, head, 2), dout = a.of_out(a.dout, head);
        pack_rows<kLanes>(size.T, size.words, q_panels, [&](auto t, auto word) { return Words::load_rows(q.rows, t, word); });
        pack_rows<kLanes>(size.T, size.words, dout_panels, [&](auto t, auto word) { return Words::load_rows(dout, t, word); });
        pack_rows<kRows>(size.T, size.words, k_panels, [&](auto t, auto word) { return Words::load_rows(k.rows, t, word); });
        pack_rows<kRows>(size.T, size.words, v_panels, [&](auto t, auto word) { return Words::load_rows(v, t, word); });
        pack_times<0>(size.times, size.D, q_times, [&](auto t, auto d) { return Words::load_times(q.rows, t, d); });
        pack_times<0>(size.times, size.D, dout_times, [&](auto t, auto d) { return Words::load_times(dout, t, d); });
        pack_times<kRows>(size.times, size.D, k_times, [&](auto t, auto d) { return Words::load_times(k.rows, t, d); });
        std::copy_n(a.lse + head * a.T, a.T, lse);
        std::fill(lse + a.T, lse + size.T, INFINITY);   // weights of 0
        deltas(a.of_out((const X*)a.out, head), dout);
    }

    void deltas(Rows<const X> out, Rows<const X> dout) {
        for (int64_t t = 0; t < size.T; t += W) {
            vec sums[W] = {};
            for (int r = 0; r < W && t + r < a.T; ++r)
                for (int64_t d = 0; d < a.D; d += W)
                    sums[r] += load_some(out.row(t + r) + d, a.D - d) * load_some(dout.row(t + r) + d, a.D - d);
            transpose(sums);
            for (int r = 1; r < W; ++r) sums[0] += sums[r];
            store(delta + t, sums[0]);
        }
    }

    // P and dS of kRows keys from j0 + j and kLanes queries from i0 + i
    void weights(int64_t i0, int64_t i, int64_t j0, int64_t j) {
        constexpr auto power = exp2<Words::kPer == 1>;
        const float* const rows[2] = {k_panels + (j0 + j) * size.words, v_panels + (j0 + j) * size.words};
        const float* const columns[2] = {q_panels + (i0 + i) * size.words, dout_panels + (i0 + i) * size.words};
        const int64_t at = i / kLanes * kBackwardKeys + j;   // the tile's first row in p and ds
        const float scale2 = a.scale2();
        vec weight[kRows][kVecs] = {}, slope[kRows][kVecs] = {};
        multiply<Words>(rows[0], 1, kRows, columns[0], kLanes, size.words, weight);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
            const vec shift = load(lse + i0 + i + v * W);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) weight[r][v] = power((weight[r][v] - shift) * scale2);
        }
        if (j0 + j + kRows > i0 + i)   // not every lane sees every key
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kVecs; ++v)
                    weight[r][v] = choose(sees(i0 + i + v * W, j0 + j + r), weight[r][v], vec{});
        Words::store_tile(p + at * kTileWords, nullptr, weight);
        multiply<Words>(rows[1], 1, kRows, columns[1], kLanes, size.words, slope);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
            const vec d = load(delta + i0 + i + v * W);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) slope[r][v] = weight[r][v] * (slope[r][v] - d);
        }
        if (j0 + j + kRows > i0 + i)   // 0 * NaN
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kVecs; ++v)
                    slope[r][v] = choose(sees(i0 + i + v * W, j0 + j + r), slope[r][v], vec{});
        Words::store_tile(ds + at * kTileWords, ds_times + at / Words::kPer * kLanes, slope);
    }

    // to (kRows keys from j, D) += words of p or ds, times x (times, D), for the queries from i0 + first to i0 + queries
    template <int V>
    INLINE void onto_keys(const float* words, const float* x, int64_t i0, int64_t j, int64_t first, int64_t queries, int64_t d,
                          float* to) {
        vec tile[kRows][V] = {};
        for (int64_t i = first; i < queries; i += kLanes)
            multiply<Words>(words + (i / kLanes * kBackwardKeys + j) * kTileWords, kTileWords, 1,
                            x + (i0 + i) / Words::kPer * size.D + d, size.D, kTileWords, tile);
        add_to(to + j * size.D + d, size.D, tile);
    }

    // The keys from j0 and queries from i0.
    void block(int64_t j0, int64_t keys, int64_t i0, int64_t queries, float* dq) {
        for (int64_t i = 0; i < queries; i += kLanes)
            for (int64_t j = 0; j < keys && j0 + j < i0 + i + kLanes; j += kRows) weights(i0, i, j0, j);
        for (int64_t j = 0; j < keys; j += kRows) {
            const int64_t first = std::max<int64_t>(0, (j0 + j - i0) / kLanes * kLanes);   // none before sees these keys
            int64_t d = 0;
            for (; d + kLanes <= size.D; d += kLanes) {
                onto_keys<kVecs>(p, dout_times, i0, j, first, queries, d, dv);
                onto_keys<kVecs>(ds, q_times, i0, j, first, queries, d, dk);
            }
            for (; d < size.D; d += W) {
                onto_keys<1>(p, dout_times, i0, j, first, queries, d, dv);
                onto_keys<1>(ds, q_times, i0, j, first, queries, d, dk);
            }
        }
        for (int64_t i = 0; i < queries; i += kLanes) {
            const int64_t steps = std::min(keys, i0 + i + kLanes - j0) / Words::kPer;
            for (int64_t d = 0; d < size.D && steps > 0; d += kRows) {
                vec tile[kRows][kVecs] = {};
                multiply<Words>(k_times + d * size.times + j0 / Words::kPer * kRows, 1, kRows,
                                ds_times + i / kLanes * kBackwardKeys / Words::kPer * kLanes, kLanes, steps, tile);
                add_to(dq + (i0 + i) * size.D + d * kLanes, kLanes, tile);
            }
        }
    }

    void keys(int64_t head, int64_t j0, float* dq) {
        const int64_t keys = std::min(kBackwardKeys, size.T - j0), next = head + 1;
        for (int which = 0; which < 5 && next < a.heads(); ++which)
            prefetch(which < 3 ? a.of_qkv(a.qkv, next, which) : a.of_out(which < 4 ? a.dout : a.out, next), j0, j0 + keys);
        for (float* sums : {dk, dv}) std::fill_n(sums, kBackwardKeys * size.D, 0.f);
        for (int64_t i0 = j0; i0 < size.T; i0 += kBackwardQueries)
            block(j0, keys, i0, std::min(kBackwardQueries, size.T - i0), dq);
        const Rows<X> to_k = a.of_qkv(a.dqkv, head, 1), to_v = a.of_qkv(a.dqkv, head, 2);
        for (int64_t j = 0; j < keys && j0 + j < a.T; ++j) {
            k.store_gradient(a, dk + j * size.D, j0 + j, to_k.row(j0 + j));
            for (int64_t d = 0; d < a.D; d += W) store_some(to_v.row(j0 + j) + d, load(dv + j * size.D + d), a.D - d);
        }
    }

    void store_dq(int64_t head, const float* dq) {
        const Rows<X> to = a.of_qkv(a.dqkv, head, 0);
        for (int64_t i0 = 0; i0 < a.T; i0 += kLanes)
            for_each_column(dq + i0 * size.D, size.D, std::min<int64_t>(kLanes, a.T - i0), [&](int64_t i, float* row) {
                q.store_gradient(a, row, i0 + i, to.row(i0 + i));
            });
    }

    static int64_t bytes(const Problem<X>& a, int threads) {
        return Backward(a, nullptr, threads).memory.next - (char*)nullptr;
    }

    static void run(const Problem<X>& a, char* scratch, int threads) {
        const auto of_thread = [&](int thread) { return Backward(a, scratch + thread * bytes(a, threads), threads); };
        const Shares shares{a.heads(), (a.T + kBackwardKeys - 1) / kBackwardKeys, threads, false};
        on_threads(threads, [&](int thread, int n) {
            for (; thread < threads; thread += n) {   // shares and buffers are for `threads`, and OpenMP may have started fewer
                Backward b = of_thread(thread);
                for (int64_t head = 0; head < shares.heads; ++head)
                    if (shares.takes_part(thread, head)) b.share_of(head, thread, shares);
            }
        });
        on_threads(threads, [&](int thread, int n) {
            for (; thread < threads; thread += n)
                for (int64_t head = 0; head < shares.heads; ++head)
                    if (shares.is_cut(head) && shares.owner(head, 0) == thread)
                        of_thread(thread).finish(head, shares, of_thread);
        });
    }

    void share_of(int64_t head, int thread, const Shares& shares) {
        float* const sums = shares.owner(head, 0) == thread ? dq : dq_shared;
        std::fill_n(sums, size.T * size.D, 0.f);
        pack(head);
        for (int64_t j = 0; j < shares.blocks; ++j)
            if (shares.owner(head, j) == thread) keys(head, j * kBackwardKeys, sums);
        if (!shares.is_cut(head)) store_dq(head, sums);
    }

    // dq of a head that was cut: this thread began it and holds the first part, the next ones hold the others.
    template <class F> void finish(int64_t head, const Shares& shares, F of_thread) {
        for (int thread = shares.owner(head, 0) + 1; thread <= shares.owner(head, shares.blocks - 1); ++thread) {
            const float* const other = of_thread(thread).dq_shared;
            for (int64_t i = 0; i < size.T * size.D; i += W) store(dq + i, load(dq + i) + load(other + i));
        }
        q.look_at(a, head, 0);
        store_dq(head, dq);
    }
};

}  // namespace

extern "C" {

// qkv (B, T, 3, H, D), out (B, T, H, D), lse (B, H, T). half: bf16, otherwise float32. D up to 256.
// scratch: attention_scratch(...) bytes from a cache line on. cosine_eps: added to mean squares; negative: no cosine attention.
int64_t attention_scratch(int backward, int64_t B, int64_t T, int64_t H, int64_t D, float cosine_eps, int half, int threads) {
    const auto bytes = [=](auto x) {
        using X = decltype(x);
        const Problem<X> a{nullptr, nullptr, nullptr, nullptr, nullptr, B, T, H, D, cosine_eps};
        return threads * (backward ? Backward<X>::bytes(a, threads) : Forward<X>::bytes(a, threads));
    };
    return half ? bytes(bf16()) : bytes(float());
}

void attention_forward(const void* qkv, void* out, float* lse, void* scratch, int64_t B, int64_t T, int64_t H, int64_t D,
                       float cosine_eps, int half, int threads) {
    const auto run = [=](auto x) {
        using X = decltype(x);
        Forward<X>::run({(const X*)qkv, lse, (X*)out, nullptr, nullptr, B, T, H, D, cosine_eps}, (char*)scratch, threads);
    };
    half ? run(bf16()) : run(float());
}

void attention_backward(const void* dout, const void* qkv, const void* out, const float* lse, void* dqkv, void* scratch,
                        int64_t B, int64_t T, int64_t H, int64_t D, float cosine_eps, int half, int threads) {
    const auto run = [=](auto x) {
        using X = decltype(x);
        Backward<X>::run({(const X*)qkv, (float*)lse, (X*)out, (const X*)dout, (X*)dqkv, B, T, H, D, cosine_eps},
                         (char*)scratch, threads);
    };
    half ? run(bf16()) : run(float());
}

}
