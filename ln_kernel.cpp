// LayerNorm and RMSNorm for CPUs: the backward pass also returns each example's squared gradient norm.
//
// x is (B, T, C), contiguous; one example is T rows of C channels. ln_autograd.cpp calls the two entry points at the bottom,
// ln_kernel.py compiles both files. C++17 with the vector extensions of GCC and Clang, intrinsics only for what those lack,
// and no torch headers.
//
// Forward:  y = (x - mean) * rstd * w + b, mean and rstd kept in float32. RMSNorm: mean = 0, b = 0. Where a branch ends in
//           the residual stream, x + branch comes first, and its row is normalised while it is in L1.
// Backward: xhat = (x - mean) * rstd,  g = dy * w
//           dx = rstd * (g - mean_C(g) - xhat * mean_C(g * xhat))        (no mean_C(g) in RMSNorm)
//           plus, after a branch, what arrives for x + branch from its other uses
//           example b adds  c_b = sum_T(dy * xhat)  to dweight and  sum_T(dy)  to dbias
//           sq[b] = |c_b|^2, and sum_j p_j c_bj^2 with a metric p
//
// Each thread owns one contiguous range of rows, whatever B is, and walks it example by example. c_b is accumulated in
// 2C floats that stay in cache; when the example ends, its norm and its share of the total are taken from there. That
// is all the extra work: one pass over 2C floats per example. An example cut by a range border leaves its parts in
// the threads' buffers and is finished after a barrier. The sums depend on the thread count only, never on timing.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kVecBytes = 64;
#elif defined(__AVX__)
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif
constexpr int64_t W = kVecBytes / sizeof(float);

typedef float vec __attribute__((vector_size(kVecBytes)));
typedef uint32_t vec_u32 __attribute__((vector_size(kVecBytes)));
typedef uint16_t vec_u16 __attribute__((vector_size(kVecBytes / 2)));
struct bf16 { uint16_t bits; };

// ---- loads and stores: V is vec, or float for the channels left over; memory is float or bf16 and may be unaligned

template <class To, class From> inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

#if defined(__AVX2__) && !defined(__AVX512F__)   // __builtin_convertvector takes twice as many instructions here
inline vec_u32 widen(vec_u16 h) { return bit_cast<vec_u32>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(h))); }
inline vec_u16 narrow(vec_u32 u) {
    const __m256i i = bit_cast<__m256i>(u);
    return bit_cast<vec_u16>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(i, i), 8)));
}
#else
inline vec_u32 widen(vec_u16 h) { return __builtin_convertvector(h, vec_u32); }
inline vec_u16 narrow(vec_u32 u) { return __builtin_convertvector(u, vec_u16); }
#endif

inline uint32_t mask_of_numbers(float v) { return v == v ? ~0u : 0u; }
inline vec_u32 mask_of_numbers(vec v) { return bit_cast<vec_u32>(v == v); }

template <class V> inline V load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V> inline V load(const bf16* p) {
    if constexpr (std::is_same_v<V, float>) {
        return bit_cast<float>(uint32_t(p->bits) << 16);
    } else {
        vec_u16 half;
        std::memcpy(&half, p, sizeof half);
        return bit_cast<vec>(widen(half) << 16);
    }
}

inline void store(float* p, float v, bool = false) { *p = v; }

inline void store(float* p, vec v, bool stream = false) {
#if defined(__AVX512F__)
    if (stream) return _mm512_stream_ps(p, bit_cast<__m512>(v));
#elif defined(__AVX__)
    if (stream) return _mm256_stream_ps(p, bit_cast<__m256>(v));
#endif
    std::memcpy(p, &v, sizeof v);
}

// Round to nearest even. A NaN is cut off instead: rounding could carry its mantissa into the sign, and its quiet bit,
// set because the value comes out of arithmetic, is among the bits that stay.
template <class U, class V> inline U round_to_bf16(V v) {
    const U u = bit_cast<U>(v), is_number = mask_of_numbers(v);
    return (u + ((0x7fffu + ((u >> 16) & 1u)) & is_number)) >> 16;
}

inline void store(bf16* p, float v, bool = false) { p->bits = uint16_t(round_to_bf16<uint32_t>(v)); }

inline void store(bf16* p, vec v, bool stream = false) {
    const vec_u16 half = narrow(round_to_bf16<vec_u32>(v));
#if defined(__AVX512F__)
    if (stream) return _mm256_stream_si256((__m256i*)p, bit_cast<__m256i>(half));
#elif defined(__AVX__)
    if (stream) return _mm_stream_si128((__m128i*)p, bit_cast<__m128i>(half));
#endif
    std::memcpy(p, &half, sizeof half);
}

// Twice as many channels at once: of floats the first and the second half, of bf16 the even and the odd ones. A bf16 is the
// upper half of a float, so that order takes one shift and one mask; the usual order, two widenings and, to store, a
// pack across lanes. Buffers of floats that go with such a bf16 row are kept in the same order.
struct Two { vec a, b; };

inline Two operator+(Two x, Two y) { return {x.a + y.a, x.b + y.b}; }
inline Two operator-(Two x, Two y) { return {x.a - y.a, x.b - y.b}; }
inline Two operator*(Two x, Two y) { return {x.a * y.a, x.b * y.b}; }
inline Two operator+(Two x, float y) { return {x.a + y, x.b + y}; }
inline Two operator-(Two x, float y) { return {x.a - y, x.b - y}; }
inline Two operator*(Two x, float y) { return {x.a * y, x.b * y}; }

template <> inline Two load<Two>(const float* p) { return {load<vec>(p), load<vec>(p + W)}; }

template <> inline Two load<Two>(const bf16* p) {
    vec_u32 u;
    std::memcpy(&u, p, sizeof u);
    return {bit_cast<vec>(u << 16), bit_cast<vec>(u & 0xffff0000u)};
}

inline void store(float* p, Two v, bool stream = false) {
    store(p, v.a, stream);
    store(p + W, v.b, stream);
}

// Rounds as round_to_bf16 does, for values that are numbers, infinite, or a NaN that arithmetic made or that came in as bf16:
// its low bits are 0, so that rounding carries nothing. backward_block writes all other NaNs.
inline void store(bf16* p, Two v, bool stream = false) {
    const vec_u32 a = bit_cast<vec_u32>(v.a), b = bit_cast<vec_u32>(v.b);
    const vec_u32 even = (a + 0x7fffu + ((a >> 16) & 1u)) >> 16, odd = b + 0x7fffu + ((b >> 16) & 1u);
    store((float*)p, bit_cast<vec>(even | (odd & 0xffff0000u)), stream);
}

// A row of C floats into the order of Two, or back; in place too.
template <bool Back> void reorder(const float* from, float* to, int64_t C) {
    for (int64_t j = 0; j + 2 * W <= C; j += 2 * W, from += 2 * W, to += 2 * W) {
        float t[2 * W];
        std::memcpy(t, from, sizeof t);
        for (int64_t i = 0; i < W; ++i) {
            to[Back ? 2 * i : i] = t[Back ? i : 2 * i];
            to[Back ? 2 * i + 1 : W + i] = t[Back ? W + i : 2 * i + 1];
        }
    }
    if (from != to) std::copy_n(from, C % (2 * W), to);
}

// ---- loops over one row

constexpr int kTurns = 4;

// A sum over channels. One accumulator would wait for the latency of its own addition, so they take turns.
struct Sum {
    vec lanes[kTurns] = {};
    float rest = 0;

    void add(Two v, int turn) {
        lanes[2 * turn] += v.a;
        lanes[2 * turn + 1] += v.b;
    }
    void add(vec v, int turn) { lanes[turn] += v; }
    void add(float v, int) { rest += v; }
    float total() const {
        const vec v = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
#if defined(__AVX__) && !defined(__AVX512F__)   // in registers: rows are short, and each waits for its sums
        const __m256 u = bit_cast<__m256>(v);
        __m128 h = _mm_add_ps(_mm256_castps256_ps128(u), _mm256_extractf128_ps(u, 1));
        h = _mm_add_ps(h, _mm_movehl_ps(h, h));
        return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h))) + rest;
#endif
        float s[W];
        std::memcpy(s, &v, sizeof v);
        for (int64_t n = W / 2; n; n /= 2)
            for (int64_t i = 0; i < n; ++i) s[i] += s[i + n];
        return s[0] + rest;
    }
};

// f(V{}, j, turn) works on the channels from j on: 2W of them where V is Two, W where it is vec, one where it is float.
// Wide is what most of them are taken as.
template <class Wide = vec, class F> inline void for_channels(int64_t C, F f) {
    constexpr int64_t wide = sizeof(Wide) / sizeof(float), turns = kTurns * W / wide;
    int64_t j = 0;
    for (; j + kTurns * W <= C; j += kTurns * W)
        for (int turn = 0; turn < turns; ++turn) f(Wide{}, j + turn * wide, turn);
    for (; j + wide <= C; j += wide) f(Wide{}, j, 0);
    for (; j + W <= C; j += W) f(vec{}, j, 0);
    for (; j < C; ++j) f(float{}, j, 0);
}

template <class F> inline float sum_channels(int64_t C, F f) {
    Sum sum;
    for_channels(C, [&](auto v, int64_t j, int turn) { sum.add(f(v, j), turn); });
    return sum.total();
}

// ---- forward

// n rows, stage by stage. A short row is over before its sum is known, and the next stage waits for that: with several
// rows in a stage the processor has other work meanwhile. Long rows go one by one, so that they stay in L1.
constexpr int64_t kForwardRows = 4, kShortRow = 512;

template <class X, class Y, bool Rms>
inline void forward_rows(const X* x, const float* w, const float* b, Y* y, float* rstd, float* mean, int64_t n, int64_t C,
                         float eps, bool stream) {
    for (int64_t i = 0; !Rms && i < n; ++i)
        mean[i] = sum_channels(C, [row = x + i * C](auto v, int64_t j) { return load<decltype(v)>(row + j); }) / C;
    for (int64_t i = 0; i < n; ++i) {
        // Two passes instead of E[x^2] - mean^2: the row is in L1, and no digits cancel.
        const float var = sum_channels(C, [row = x + i * C, m = Rms ? 0 : mean[i]](auto v, int64_t j) {
            const auto d = load<decltype(v)>(row + j) - m;
            return d * d;
        }) / C;
        rstd[i] = 1 / std::sqrt(var + eps);
    }
    for (int64_t i = 0; i < n; ++i)
        for_channels(C, [=, row = x + i * C, out = y + i * C, m = Rms ? 0 : mean[i], r = rstd[i]](auto v, int64_t j, int) {
            using V = decltype(v);
            __builtin_prefetch(row + n * C + j);   // the next rows, while this loop leaves the memory bus to writes; after a
                                                   // branch, the lines that their sum will be written to
            const V h = (load<V>(row + j) - m) * r;
            store(out + j, b ? h * load<V>(w + j) + load<V>(b + j) : h * load<V>(w + j), stream);
        });
}

// ---- backward

template <class X, class Y> struct Backward {
    const Y* dy;               // (B, T, C)
    const X* ds;               // (B, T, C) or null: added to dx
    const X* x;                // (B, T, C)
    const float* w;            // (C,)
    const float *rstd, *mean;  // (B * T,) each
    const float* metric;       // (1 or 2, C) or null
    X* dx;                     // (B, T, C)
    float *dw, *db;            // (C,) each
    float* sq;                 // (1 or 2 kinds, and the same in the metric, B) or null
    int64_t B, T, C;
    bool stream;
};

template <class X, class Y>
constexpr bool kBothBf16 = std::is_same_v<X, bf16> && std::is_same_v<Y, bf16>;
template <class X, class Y> using Wide = std::conditional_t<kBothBf16<X, Y>, Two, vec>;

// N rows of one example, twice. First, row by row, the two sums that dx waits for. Then, from L1 or L2, channel by channel
// through all N rows, dx and their share of c_b. Long rows go in blocks of four, which load and store the 2C accumulators a
// quarter as often; short ones have them in L1 anyway, and where stores stream, rows in parallel are slower by up to half: they
// break up the streams that prefetcher and write buffers follow. The order of additions is that of the rows in any case.
constexpr int kBlockRows = 4;
constexpr int64_t kLongRow = 2048;

struct Row { float mean, rstd, slope, shift; };

template <bool Rms, class X, class Y>
inline Row row_sums(const Backward<X, Y>& a, int64_t row) {
    const X* x = a.x + row * a.C;
    const Y* dy = a.dy + row * a.C;
    const float rstd = a.rstd[row], mean = Rms ? 0 : a.mean[row];
    Sum sum_g, sum_gc;
    for_channels<Wide<X, Y>>(a.C, [&](auto v, int64_t j, int turn) {
        using V = decltype(v);
        const V g = load<V>(dy + j) * load<V>(a.w + j), xj = load<V>(x + j);
        sum_gc.add(g * (Rms ? xj : xj - mean), turn);
        if (!Rms) sum_g.add(g, turn);
    });
    return {mean, rstd, sum_gc.total() / a.C * rstd * rstd * rstd, sum_g.total() / a.C * rstd};
}

template <int N, bool Rms, bool Bias, bool Add, class X, class Y>
inline void write_block(const Backward<X, Y>& a, int64_t first, const Row* rows, float* acc_w, float* acc_b) {
    const int64_t C = a.C;
    for_channels<Wide<X, Y>>(C, [&](auto v, int64_t j, int) {
        using V = decltype(v);
        const V w = load<V>(a.w + j);
        V cw = load<V>(acc_w + j), cb{};
        if (Bias) cb = load<V>(acc_b + j);
        const int64_t from = first * C + j;
        const X* x = a.x + from;
        const Y* dy = a.dy + from;
        X* dx = a.dx + from;
        for (int i = 0; i < N; ++i, x += C, dy += C, dx += C) {
            const Row& r = rows[i];
            if (N == 1) {   // the next row, while this loop leaves the memory bus to writes
                __builtin_prefetch(x + C);
                __builtin_prefetch(dy + C);
            }
            const V d = load<V>(dy), xi = load<V>(x), c = Rms ? xi : xi - r.mean, dr = d * r.rstd;
            cw = cw + dr * c;
            if (Bias) cb = cb + d;
            V out = dr * w - (Rms ? c * r.slope : c * r.slope + r.shift);
            if constexpr (Add) out = out + load<V>(a.ds + from + i * C);
            store(dx, out, a.stream);
        }
        store(acc_w + j, cw);
        if (Bias) store(acc_b + j, cb);
    });
}

// Streaming stores are weakly ordered: finish them before anybody else, or a plain store of ours, touches the same bytes.
inline void end_stream() {
#ifdef __AVX__
    _mm_sfence();
#endif
}

template <int N, bool Rms, bool Bias, class X, class Y>
inline void backward_block(const Backward<X, Y>& a, int64_t first, float* acc_w, float* acc_b) {
    Row rows[N];
    for (int i = 0; i < N; ++i) rows[i] = row_sums<Rms>(a, first + i);
    if (a.ds) write_block<N, Rms, Bias, true>(a, first, rows, acc_w, acc_b);
    else write_block<N, Rms, Bias, false>(a, first, rows, acc_w, acc_b);
    for (int i = 0; i < N; ++i) {
        if (rows[i].slope == rows[i].slope && rows[i].shift == rows[i].shift) continue;
        if (a.stream) end_stream();   // a NaN in the row reaches all of it
        for (int64_t j = 0; j < a.C; ++j) store(a.dx + (first + i) * a.C + j, std::numeric_limits<float>::quiet_NaN());
    }
}

// What one thread has: a range of rows, and three buffers of 2C floats (weight part, bias part).
struct Share {
    int64_t begin, end;   // rows
    float* head;          // the example that began in an earlier range, or is cut by the end of this one and fills it
    float* tail;          // one after the other, every further example; at the end, the one cut by the end of the range
    float* total;
};

inline Share share_of(int thread, int threads, int64_t rows, int64_t C, float* buffers) {
    float* mine = buffers + thread * 6 * C;
    return {rows * thread / threads, rows * (thread + 1) / threads, mine, mine + 2 * C, mine + 4 * C};
}

inline void add_to(float* sum, const float* part, int64_t n) {
    for_channels(n, [=](auto v, int64_t j, int) {
        using V = decltype(v);
        store(sum + j, load<V>(sum + j) + load<V>(part + j));
    });
}

template <bool Rms, bool Bias, class X, class Y>
void squared_norms(const Backward<X, Y>& a, int64_t b, const float* acc) {
    constexpr int64_t kinds = Rms ? 1 : 2;   // weight, bias
    for (int64_t kind = 0; a.sq && kind < kinds; ++kind) {
        const float *c = acc + kind * a.C, *p = a.metric ? a.metric + kind * a.C : nullptr;
        const int64_t n = kind == 1 && !Bias ? 0 : a.C;   // no bias: a norm of 0
        a.sq[kind * a.B + b] = sum_channels(n, [=](auto v, int64_t j) {
            const auto cj = load<decltype(v)>(c + j);
            return cj * cj;
        });
        if (p) a.sq[(kinds + kind) * a.B + b] = sum_channels(n, [=](auto v, int64_t j) {
            const auto cj = load<decltype(v)>(c + j);
            return cj * cj * load<decltype(v)>(p + j);
        });
    }
}

template <bool Rms, bool Bias, class X, class Y> void backward_share(const Backward<X, Y>& a, const Share& s) {
    const int64_t n = Bias ? 2 * a.C : a.C;
    const bool long_rows = a.C >= kLongRow && !a.stream;
    std::fill_n(s.total, n, 0.f);
    for (int64_t row = s.begin; row < s.end;) {
        const int64_t b = row / a.T, begin = b * a.T, end = begin + a.T, stop = std::min(end, s.end);
        const bool whole = row == begin && stop == end;
        float* acc = row == s.begin && !whole ? s.head : s.tail;
        std::fill_n(acc, n, 0.f);
        for (; long_rows && row + kBlockRows <= stop; row += kBlockRows)
            backward_block<kBlockRows, Rms, Bias>(a, row, acc, acc + a.C);
        for (; row < stop; ++row) backward_block<1, Rms, Bias>(a, row, acc, acc + a.C);
        if (kBothBf16<X, Y>) for (int64_t from = 0; from < n; from += a.C) reorder<true>(acc + from, acc + from, a.C);
        add_to(s.total, acc, n);
        if (whole) squared_norms<Rms, Bias>(a, b, acc);
    }
}

// If an example begins in this thread's range and is cut by its end: add up the parts in thread order.
template <bool Rms, bool Bias, class X, class Y>
void finish_cut_example(const Backward<X, Y>& a, int thread, int threads, float* buffers) {
    const Share s = share_of(thread, threads, a.B * a.T, a.C, buffers);
    const int64_t b = (s.end - 1) / a.T, begin = b * a.T, end = begin + a.T;
    if (s.begin == s.end || end == s.end || begin < s.begin) return;
    float* acc = begin == s.begin ? s.head : s.tail;
    for (int t = thread + 1; t < threads; ++t) {
        const Share next = share_of(t, threads, a.B * a.T, a.C, buffers);
        if (next.begin < std::min(next.end, end)) add_to(acc, next.head, Bias ? 2 * a.C : a.C);
    }
    squared_norms<Rms, Bias>(a, b, acc);
}

// dweight and dbias: each thread adds up the totals of all threads for its part of the channels.
template <bool Bias, class X, class Y>
void finish_total(const Backward<X, Y>& a, int thread, int threads, float* buffers) {
    const int64_t first = a.C * thread / threads, n = a.C * (thread + 1) / threads - first;
    for (int64_t kind = 0; kind < (Bias ? 2 : 1); ++kind) {
        float* out = (kind ? a.db : a.dw) + first;
        std::fill_n(out, n, 0.f);
        for (int t = 0; t < threads; ++t)
            add_to(out, share_of(t, threads, a.B * a.T, a.C, buffers).total + kind * a.C + first, n);
    }
}

// Run f(thread, threads) on each thread.
template <class F> void on_threads(int threads, F f) {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        f(omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    f(0, 1);
}

inline void wait_for_all() {
#ifdef _OPENMP
#pragma omp barrier
#endif
}

// A streaming store goes past the caches: no read of the line first, and nothing useful is evicted. It pays when the
// output is so large that the next operation would not find it there anyway. 8 MB is where it began to pay on a machine
// with 32 MB of last-level cache, measured with a matrix product as the next operation.
template <class Out> bool should_stream(const Out* out, int64_t rows, int64_t C) {
    const bool aligned = reinterpret_cast<uintptr_t>(out) % kVecBytes == 0 && C * sizeof(Out) % kVecBytes == 0;
    return aligned && rows * C * sizeof(Out) >= size_t(8) << 20;
}

template <bool Rms, bool Bias, class X, class Y> void backward(Backward<X, Y> a, int threads) {
    std::unique_ptr<float[]> buffers(new float[(threads * 6 + 1) * a.C]);
    if (kBothBf16<X, Y>) {
        float* w = buffers.get() + threads * 6 * a.C;
        reorder<false>(a.w, w, a.C);
        a.w = w;
    }
    on_threads(threads, [&](int thread, int n) {
        backward_share<Rms, Bias>(a, share_of(thread, n, a.B * a.T, a.C, buffers.get()));
        if (a.stream) end_stream();
        if (n > 1) wait_for_all();
        finish_cut_example<Rms, Bias>(a, thread, n, buffers.get());
        finish_total<Bias>(a, thread, n, buffers.get());
    });
}

template <bool Rms, class X, class Y>
void forward(const X* x, const Y* branch, X* sum, const float* w, const float* b, Y* y, float* stats, int64_t rows, int64_t C,
             float eps, bool stream, int threads) {
    on_threads(threads, [=](int thread, int n) {
        const int64_t end = rows * (thread + 1) / n, most = C <= kShortRow ? kForwardRows : 1;
        for (int64_t i = rows * thread / n, count; i < end; i += count) {
            count = std::min(most, end - i);
            if (branch) for_channels(count * C, [=, from = i * C](auto v, int64_t j, int) {
                using V = decltype(v);
                store(sum + from + j, load<V>(x + from + j) + load<V>(branch + from + j));
            });
            forward_rows<X, Y, Rms>((branch ? sum : x) + i * C, w, b, y + i * C, stats + i, stats + rows + i, count, C, eps,
                                    stream);
        }
        if (stream) end_stream();
    });
}

}  // namespace

extern "C" {

// dtypes: 0 float32 x and y, 1 float32 x and bf16 y, 2 bf16 x and y. stats: (2, rows) rstd and mean; RMSNorm: rstd.
// branch, of y's dtype, may be null; else sum, of x's, gets x + branch, and that is normalised.
void norm_forward(const void* x, const void* branch, void* sum, const float* w, const float* b, void* y, float* stats,
                  int64_t rows, int64_t C, float eps, int rms, int dtypes, int threads) {
    auto run = [=](auto x, auto y) {
        using X = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
        using Y = std::remove_pointer_t<decltype(y)>;
        const bool stream = should_stream(y, rows, C);
        const auto f = rms ? forward<true, X, Y> : forward<false, X, Y>;
        f(x, (const Y*)branch, (X*)sum, w, b, y, stats, rows, C, eps, stream, threads);
    };
    if (dtypes == 0) run((const float*)x, (float*)y);
    if (dtypes == 1) run((const float*)x, (bf16*)y);
    if (dtypes == 2) run((const bf16*)x, (bf16*)y);
}

// x: what was normalised. ds, of x's dtype, may be null: it is added to dx.
void norm_backward(const void* dy, const void* ds, const void* x, const float* w, const float* stats, const float* metric,
                   void* dx, float* dw, float* db, float* sq, int64_t B, int64_t T, int64_t C, int rms, int dtypes,
                   int threads) {
    auto run = [=](auto dy, auto x) {
        using X = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
        using Y = std::remove_const_t<std::remove_pointer_t<decltype(dy)>>;
        const bool stream = should_stream((X*)dx, B * T, C);
        const Backward<X, Y> a{dy, (const X*)ds, x, w, stats, stats + B * T, metric, (X*)dx, dw, db, sq, B, T, C, stream};
        if (rms) backward<true, false>(a, threads);
        else if (db) backward<false, true>(a, threads);
        else backward<false, false>(a, threads);
    };
    if (dtypes == 0) run((const float*)dy, (const float*)x);
    if (dtypes == 1) run((const bf16*)dy, (const float*)x);
    if (dtypes == 2) run((const bf16*)dy, (const bf16*)x);
}

}
