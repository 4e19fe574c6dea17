// LayerNorm and RMSNorm for CPUs: the backward pass also returns each example's squared gradient norm.
//
// x is (B, T, C), contiguous; one example is T rows of C channels. ln_autograd.cpp calls the entry points at the bottom,
// build.py compiles both files. No torch headers.
//
// Forward:  y = (x - mean) * rstd * w + b, mean and rstd kept in float32. RMSNorm: mean = 0, b = 0. Where a branch ends in
//           the residual stream, x + branch comes first, and its row is normalised while it is in L1.
// Backward: xhat = (x - mean) * rstd,  g = dy * w
//           dx = rstd * (g - mean_C(g) - xhat * mean_C(g * xhat))        (no mean_C(g) in RMSNorm)
//           plus, after a branch, what arrives for x + branch from its other uses
//           example b adds  c_b = sum_T(dy * xhat)  to dweight and  sum_T(dy)  to dbias
//           sq[b] = |c_b|^2, and sum_j p_j c_bj^2 with a metric p
// Tap:      c_b alone, for a norm layer of somebody else's
//
// Each thread owns one contiguous range of rows, whatever B is, and walks it example by example. c_b is accumulated in
// 2C floats that stay in cache; when the example ends, its norm and its share of the total are taken from there. That
// is all the extra work: one pass over 2C floats per example. An example cut by a range border leaves its parts in
// the threads' buffers and is finished after a barrier. The sums depend on the thread count only, never on timing.

#include <algorithm>
#include <cmath>
#include <memory>

#include "vec.h"

namespace {

// ---- channels: of a row, taken as vec where W of them are left, else as float

// Twice as many channels at once: of floats the first and the second half, of bf16 the even and the odd ones. A bf16 is the
// upper half of a float, so that order takes one shift and one mask; the usual order, two widenings. Buffers of floats
// that go with such a bf16 row are kept in the same order.
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

template <bool Stream = false> inline void store(float* p, Two v) {
    store<Stream>(p, v.a);
    store<Stream>(p + W, v.b);
}

template <bool Stream = false> inline void store(bf16* p, Two v) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)   // one half behind the other, then zipped
    static constexpr uint16_t zip[] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const auto halves = _mm512_cvtne2ps_pbh(bit_cast<__m512>(v.b), bit_cast<__m512>(v.a));
    const __m512i both = _mm512_permutexvar_epi16(_mm512_loadu_si512(zip), bit_cast<__m512i>(halves));
#else
    const vec_u32 both = (rounded<vec_u32>(v.a) >> 16) | (rounded<vec_u32>(v.b) & 0xffff0000u);
#endif
    store<Stream>((float*)p, bit_cast<vec>(both));
}

// C floats into the order of Two, or back; in place too.
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

// Buffers begin at cache lines: a vector across the border of two takes twice as long.
constexpr int64_t kLine = 64;
inline int64_t padded(int64_t floats) { return round_up(floats * sizeof(float), kLine) / sizeof(float); }

struct Floats {
    explicit Floats(int64_t n) : memory(new float[n + kLine / sizeof(float)]) {}
    float* begin() const { return reinterpret_cast<float*>((uintptr_t(memory.get()) + kLine - 1) / kLine * kLine); }
    std::unique_ptr<float[]> memory;
};

// What a row's channels are taken as.
template <class X, class Y>
constexpr bool kBothBf16 = std::is_same_v<X, bf16> && std::is_same_v<Y, bf16>;
template <class X, class Y> using Wide = std::conditional_t<kBothBf16<X, Y>, Two, vec>;

// ---- loops over one row. Always inlined: a body that is called keeps its sums in memory, and since any store might then
// change what it points to, loads all its pointers anew for every vector. That took half as long again.

// A sum over channels. One accumulator would wait for the latency of its own addition, so several may take turns.
template <int Lanes> struct Sum {
    vec lanes[Lanes] = {};
    float rest = 0;

    void add(Two v, int turn) {
        lanes[2 * turn % Lanes] += v.a;
        lanes[(2 * turn + 1) % Lanes] += v.b;
    }
    void add(vec v, int turn) { lanes[turn] += v; }
    void add(float v, int) { rest += v; }
    float total() const {
        vec v = lanes[0];
        for (int i = 1; i < Lanes; ++i) v += lanes[i];
#if defined(__AVX512F__)   // in registers: rows are short, and each waits for its sums
        return _mm512_reduce_add_ps(bit_cast<__m512>(v)) + rest;
#elif defined(__AVX__)
        const __m256 u = bit_cast<__m256>(v);
        __m128 h = _mm_add_ps(_mm256_castps256_ps128(u), _mm256_extractf128_ps(u, 1));
        h = _mm_add_ps(h, _mm_movehl_ps(h, h));
        return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h))) + rest;
#else
        float s[W];
        std::memcpy(s, &v, sizeof v);
        for (int64_t n = W / 2; n; n /= 2)
            for (int64_t i = 0; i < n; ++i) s[i] += s[i + n];
        return s[0] + rest;
#endif
    }
};

// f(V{}, j, turn) works on the channels from j on: 2W of them where V is Two, W where it is vec, one where it is float.
// Wide is what most of them are taken as.
template <class Wide = vec, int Turns = 1, class F> INLINE void for_channels(int64_t C, F f) {
    constexpr int64_t wide = sizeof(Wide) / sizeof(float);
    int64_t j = 0;
    for (; j + Turns * wide <= C; j += Turns * wide)
        for (int turn = 0; turn < Turns; ++turn) f(Wide{}, j + turn * wide, turn);
    for (; j + wide <= C; j += wide) f(Wide{}, j, 0);
    for (; j + W <= C; j += W) f(vec{}, j, 0);
    for (; j < C; ++j) f(float{}, j, 0);
}

constexpr int kLanes = 4;
template <class Wide> constexpr int kTurns = kLanes * sizeof(vec) / sizeof(Wide);

template <class Wide = vec, class F> INLINE float sum_channels(int64_t C, F f) {
    Sum<kLanes> sum;
    for_channels<Wide, kTurns<Wide>>(C, [&](auto v, int64_t j, int turn) ALWAYS_INLINE { sum.add(f(v, j), turn); });
    return sum.total();
}

// ---- forward

// Two passes instead of E[x^2] - mean^2: the row is in L1, and no digits cancel.
template <class Wide, class X> INLINE float mean_of(const X* row, int64_t C) {
    return sum_channels<Wide>(C, [=](auto v, int64_t j) ALWAYS_INLINE { return load<decltype(v)>(row + j); }) / C;
}

// The sum of a row far from 0 was rounded by more than its mean can bear; what is left after the subtraction says by how much.
// (bf16 can bear it.)
template <class Wide, bool Rms, class X> INLINE float rstd_of(const X* row, float* mean, int64_t C, float eps) {
    constexpr bool mend = !Rms && std::is_same_v<X, float>;
    const float m = Rms ? 0 : *mean;
    Sum<kLanes> sum_d, sum_dd;
    for_channels<Wide, kTurns<Wide>>(C, [&](auto v, int64_t j, int turn) ALWAYS_INLINE {
        const auto d = load<decltype(v)>(row + j) - m;
        sum_dd.add(d * d, turn);
        if (mend) sum_d.add(d, turn);
    });
    const float left = mend ? sum_d.total() / C : 0;
    if (mend) *mean = m + left;
    const float var = sum_dd.total() / C - left * left;   // may be rounded to below 0; a NaN stays one
    return 1 / std::sqrt(std::max(var, 0.f) + eps);
}

// n rows, stage by stage. A short row is over before its sum is known, and the next stage waits for that: with several
// rows in a stage the processor has other work meanwhile. Long rows go one by one, so that they stay in L1.
constexpr int64_t kForwardRows = 4, kInterleavedRow = 512;

// row: where x + branch is while it is normalised, in sum itself or, if that is streamed, in a buffer.
template <class X, class Y, bool Rms, bool Stream, bool StreamSum>
inline void forward_rows(const X* input, const Y* branch, X* sum, X* row, const float* w, const float* b, Y* y, float* rstd,
                         float* mean, int64_t n, int64_t C, float eps) {
    using Wide = Wide<X, Y>;
    const X* x = branch ? row : input;
    if (branch) for_channels<Wide>(n * C, [=](auto v, int64_t j, int) ALWAYS_INLINE {
        using V = decltype(v);
        store(row + j, load<V>(input + j) + load<V>(branch + j));
    });
    for (int64_t i = 0; !Rms && i < n; ++i) mean[i] = mean_of<Wide>(x + i * C, C);
    for (int64_t i = 0; i < n; ++i) rstd[i] = rstd_of<Wide, Rms>(x + i * C, Rms ? nullptr : mean + i, C, eps);
    for (int64_t i = 0; i < n; ++i)
        for_channels<Wide>(C, [=, at = i * C, m = Rms ? 0 : mean[i], r = rstd[i]](auto v, int64_t j, int) ALWAYS_INLINE {
            using V = decltype(v);
            __builtin_prefetch(input + n * C + at + j);   // the next rows, while this loop leaves the memory bus to writes
            if (branch) __builtin_prefetch(branch + n * C + at + j);
            const V xi = load<V>(x + at + j), h = (xi - m) * r;
            if (StreamSum) store<true>(sum + at + j, xi);
            store<Stream>(y + at + j, b ? h * load<V>(w + j) + load<V>(b + j) : h * load<V>(w + j));
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

// What dx of a row needs to know beside dy, x and w: dx = dy * w * rstd - (x - mean) * slope - shift.
struct Row { float mean, rstd, slope, shift; };

// N rows of one example, twice: first the two sums that dx waits for, then, from L1 or L2, dx and their share of c_b, which
// takes loads and stores of 2C accumulators. Rows are added in order, so N changes no bit of c_b; of dx it may change the
// last, since a row's sums have fewer lanes. Long rows go by four, for the accumulators are not in L1 between them. Short
// ones go one by one: read and written in one line from end to end, memory is up to twice as fast as by several rows.
constexpr int kRows = 4;
constexpr int64_t kShortRow = 1024;

template <int N, bool Rms, class X, class Y> INLINE void row_sums(const Backward<X, Y>& a, int64_t first, Row* rows) {
    const int64_t C = a.C;
    const float* const weight = a.w;
    const X* const x = a.x + first * C;
    const Y* const dy = a.dy + first * C;
    float mean[N];
    for (int i = 0; i < N; ++i) mean[i] = Rms ? 0 : a.mean[first + i];
    constexpr int lanes = kLanes / N, turns = std::max<int>(1, lanes * sizeof(vec) / sizeof(Wide<X, Y>));
    Sum<lanes> sum_g[N], sum_gc[N];
    for_channels<Wide<X, Y>, turns>(C, [&](auto v, int64_t j, int turn) ALWAYS_INLINE {
        using V = decltype(v);
        const V w = load<V>(weight + j);
        for (int64_t i = 0; i < N; ++i) {
            if (N > 1) __builtin_prefetch(x + (N + i) * C + j, 0, 2);   // the next rows: see write_rows
            const V g = load<V>(dy + i * C + j) * w, xi = load<V>(x + i * C + j);
            sum_gc[i].add(g * (Rms ? xi : xi - mean[i]), turn);
            if (!Rms) sum_g[i].add(g, turn);
        }
    });
    for (int i = 0; i < N; ++i) {
        const float rstd = a.rstd[first + i];
        rows[i] = {mean[i], rstd, sum_gc[i].total() / C * rstd * rstd * rstd, sum_g[i].total() / C * rstd};
    }
}

template <int N, bool Rms, bool Bias, bool Add, bool Stream, class X, class Y>
INLINE void write_rows(const Backward<X, Y>& a, int64_t first, const Row (&rows)[N], float* acc_w, float* acc_b) {
    const int64_t C = a.C;
    const float* const weight = a.w;
    const X *const x = a.x + first * C, *const ds = Add ? a.ds + first * C : nullptr;
    const Y* const dy = a.dy + first * C;
    X* const dx = a.dx + first * C;
    for_channels<Wide<X, Y>>(C, [&](auto v, int64_t j, int) ALWAYS_INLINE {
        using V = decltype(v);
        const V w = load<V>(weight + j);
        V cw = load<V>(acc_w + j), cb{};
        if (Bias) cb = load<V>(acc_b + j);
        for (int64_t i = 0; i < N; ++i) {
            const int64_t at = i * C + j;
            // The next row, into L1, while this loop leaves the memory bus to writes. x is as old as the forward pass; dy is
            // new, and often still in a cache. Four long rows would not fit into L1, so they go to L2, dy from here and x from
            // row_sums: memory has work in both loops.
            if (N == 1) __builtin_prefetch(x + C + at);
            if (N == 1 && Stream && std::is_same_v<Y, bf16>) __builtin_prefetch(dy + C + at);
            if (N > 1) __builtin_prefetch(dy + N * C + at, 0, 2);
            const V d = load<V>(dy + at), xi = load<V>(x + at), c = Rms ? xi : xi - rows[i].mean, dr = d * rows[i].rstd;
            cw = cw + dr * c;
            if (Bias) cb = cb + d;
            V out = dr * w - (Rms ? c * rows[i].slope : c * rows[i].slope + rows[i].shift);
            if constexpr (Add) out = out + load<V>(ds + at);
            store<Stream>(dx + at, out);
        }
        store(acc_w + j, cw);
        if (Bias) store(acc_b + j, cb);
    });
}

// As many of the rows first to stop, all of one example, as are whole Ns. Returns the first row that is left.
template <int N, bool Rms, bool Bias, bool Add, bool Stream, class X, class Y>
int64_t backward_by(const Backward<X, Y>& a, int64_t first, int64_t stop, float* acc_w, float* acc_b) {
    for (; first + N <= stop; first += N) {
        Row rows[N];
        row_sums<N, Rms>(a, first, rows);
        write_rows<N, Rms, Bias, Add, Stream>(a, first, rows, acc_w, acc_b);
    }
    return first;
}

template <bool Rms, bool Bias, bool Add, bool Stream, class X, class Y>
void backward_rows(const Backward<X, Y>& a, int64_t first, int64_t stop, float* acc_w, float* acc_b) {
    if (a.C > kShortRow) first = backward_by<kRows, Rms, Bias, Add, Stream>(a, first, stop, acc_w, acc_b);
    backward_by<1, Rms, Bias, Add, Stream>(a, first, stop, acc_w, acc_b);
}

// Streaming stores are weakly ordered: finish them before anybody else touches the same bytes.
inline void end_stream() {
#ifdef __AVX__
    _mm_sfence();
#endif
}

// What one thread has: a range of rows, and three buffers of 2C floats (weight part, bias part).
struct Share {
    int64_t begin, end;   // rows
    float* head;          // the example that began in an earlier range, or is cut by the end of this one and fills it
    float* tail;          // one after the other, every further example; at the end, the one cut by the end of the range
    float* total;
};

inline Share share_of(int thread, int threads, int64_t rows, int64_t C, float* buffers) {
    const int64_t size = padded(2 * C);
    float* mine = buffers + thread * 3 * size;
    return {rows * thread / threads, rows * (thread + 1) / threads, mine, mine + size, mine + 2 * size};
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
    const auto add_rows = a.stream ? backward_rows<Rms, Bias, true, true, X, Y> : backward_rows<Rms, Bias, true, false, X, Y>;
    const auto own_rows = a.stream ? backward_rows<Rms, Bias, false, true, X, Y> : backward_rows<Rms, Bias, false, false, X, Y>;
    const auto rows = a.ds ? add_rows : own_rows;
    std::fill_n(s.total, n, 0.f);
    for (int64_t row = s.begin, stop; row < s.end; row = stop) {
        const int64_t b = row / a.T, begin = b * a.T, end = begin + a.T;
        stop = std::min(end, s.end);
        const bool whole = row == begin && stop == end;
        float* acc = row == s.begin && !whole ? s.head : s.tail;
        std::fill_n(acc, n, 0.f);
        rows(a, row, stop, acc, acc + a.C);
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
    const auto border = [&](int t) { return t == threads ? a.C : a.C * t / threads / (2 * W) * (2 * W); };   // whole Twos
    const int64_t first = border(thread), n = border(thread + 1) - first;
    for (int64_t kind = 0; kind < (Bias ? 2 : 1); ++kind) {
        float* out = (kind ? a.db : a.dw) + first;
        std::fill_n(out, n, 0.f);
        for (int t = 0; t < threads; ++t)
            add_to(out, share_of(t, threads, a.B * a.T, a.C, buffers).total + kind * a.C + first, n);
        if (kBothBf16<X, Y>) reorder<true>(out, out, n);
    }
}

inline void wait_for_all() {
#ifdef _OPENMP
#pragma omp barrier
#endif
}

// A streaming store goes past the caches: no read of the line first, and nothing useful is evicted. It pays when the
// output is so large that the next operation would not find it there anyway. 8 MB is where it began to pay on a machine
// with 32 MB of last-level cache, measured with a matrix product as the next operation. x + branch is not needed before the
// next norm layer, and pays earlier: 3 and 4.7 MB of it (gpt_111m and char of bench.py step) took 0.78 and 0.71 of the time of
// the forward kernel within a training step. 1 MB is a guess.
constexpr size_t kStreamBytes = size_t(8) << 20, kStreamSumBytes = size_t(1) << 20;
#ifdef __AVX__
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;
#endif

template <class Out> bool should_stream(const Out* out, int64_t rows, int64_t C, size_t from = kStreamBytes) {
    const bool aligned = reinterpret_cast<uintptr_t>(out) % kVecBytes == 0 && C * sizeof(Out) % kVecBytes == 0;
    return kCanStream && aligned && rows * C * sizeof(Out) >= from;
}

template <bool Rms, bool Bias, class X, class Y> void backward(Backward<X, Y> a, int threads) {
    const Floats memory(threads * 3 * padded(2 * a.C) + 3 * padded(a.C));
    float *buffers = memory.begin(), *w = buffers + threads * 3 * padded(2 * a.C), *metric = w + padded(a.C);
    if (kBothBf16<X, Y>) {
        reorder<false>(a.w, w, a.C);
        a.w = w;
    }
    if (kBothBf16<X, Y> && a.metric) {
        for (int64_t from = 0; from < (Rms ? 1 : 2) * a.C; from += a.C) reorder<false>(a.metric + from, metric + from, a.C);
        a.metric = metric;
    }
    on_threads(threads, [&](int thread, int n) {
        backward_share<Rms, Bias>(a, share_of(thread, n, a.B * a.T, a.C, buffers));
        if (a.stream) end_stream();
        if (n > 1) wait_for_all();
        finish_cut_example<Rms, Bias>(a, thread, n, buffers);
        finish_total<Bias>(a, thread, n, buffers);
    });
}

template <bool Rms, class X, class Y>
void forward(const X* x, const Y* branch, X* sum, const float* w, const float* b, Y* y, float* stats, int64_t rows, int64_t C,
             float eps, bool stream, int threads) {
    const bool stream_sum = branch && should_stream(sum, rows, C, kStreamSumBytes);
    const int64_t two = kBothBf16<X, Y> ? 2 * padded(C) : 0;
    const Floats memory(two + (stream_sum ? threads * padded(C) : 0));
    if (kBothBf16<X, Y>) {
        float *w_two = memory.begin(), *b_two = w_two + padded(C);
        reorder<false>(w, w_two, C);
        if (b) reorder<false>(b, b_two, C);
        w = w_two, b = b ? b_two : nullptr;
    }
    const auto kept = stream ? forward_rows<X, Y, Rms, true, false> : forward_rows<X, Y, Rms, false, false>;
    const auto streamed = stream ? forward_rows<X, Y, Rms, true, true> : forward_rows<X, Y, Rms, false, true>;
    const auto normalise = stream_sum ? streamed : kept;
    on_threads(threads, [=, &memory](int thread, int n) {
        X* const buffer = reinterpret_cast<X*>(memory.begin() + two + thread * padded(C));
        const int64_t most = C <= kInterleavedRow && !stream_sum ? kForwardRows : 1;   // the buffer holds one row
        const int64_t end = rows * (thread + 1) / n;
        for (int64_t i = rows * thread / n, count; i < end; i += count) {
            count = std::min(most, end - i);
            X* const s = branch ? sum + i * C : nullptr;
            normalise(x + i * C, branch ? branch + i * C : nullptr, s, stream_sum ? buffer : s, w, b, y + i * C, stats + i,
                      stats + rows + i, count, C, eps);
        }
        if (stream || stream_sum) end_stream();
    });
}

// ---- a tap: c_b of each example, from the x and dy of a norm layer that somebody else computes, read once each

// The rows first to stop of one example, into acc, (1 or 2, C).
template <bool Rms, bool Bias, class X, class Y>
void tap_rows(const Y* dy, const X* x, float* acc, int64_t first, int64_t stop, int64_t C, float eps) {
    std::fill_n(acc, (Bias ? 2 : 1) * C, 0.f);
    for (int64_t row = first; row < stop; ++row) {
        const X* const xs = x + row * C;
        const Y* const ds = dy + row * C;
        float mean = Rms ? 0 : mean_of<Wide<X, Y>>(xs, C);
        const float rstd = rstd_of<Wide<X, Y>, Rms>(xs, &mean, C, eps);
        for_channels<Wide<X, Y>>(C, [&](auto v, int64_t j, int) ALWAYS_INLINE {
            using V = decltype(v);
            __builtin_prefetch(xs + C + j);
            const V d = load<V>(ds + j);
            store(acc + j, load<V>(acc + j) + d * ((load<V>(xs + j) - mean) * rstd));
            if (Bias) store(acc + C + j, load<V>(acc + C + j) + d);
        });
    }
    for (int64_t kind = 0; kBothBf16<X, Y> && kind < (Bias ? 2 : 1); ++kind) reorder<true>(acc + kind * C, acc + kind * C, C);
}

// Where there are fewer examples than threads, each is cut into parts, which are added up in order.
template <bool Rms, bool Bias, class X, class Y>
void tap(const Y* dy, const X* x, float* rows, int64_t B, int64_t T, int64_t C, float eps, int threads) {
    const int64_t n = (Bias ? 2 : 1) * C, parts = std::min<int64_t>(T, (threads + B - 1) / B);
    const Floats memory(parts > 1 ? B * parts * n : 0);
    float* const out = parts > 1 ? memory.begin() : rows;
    on_threads(threads, [=](int thread, int workers) {
        for (int64_t i = B * parts * thread / workers; i < B * parts * (thread + 1) / workers; ++i) {
            const int64_t begin = i / parts * T, part = i % parts;
            tap_rows<Rms, Bias>(dy, x, out + i * n, begin + part * T / parts, begin + (part + 1) * T / parts, C, eps);
        }
    });
    if (parts == 1) return;
    std::fill_n(rows, B * n, 0.f);
    for (int64_t i = 0; i < B * parts; ++i) add_to(rows + i / parts * n, out + i * n, n);
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

// rows: (B, 1 or 2, C).
void norm_tap(const void* dy, const void* x, float* rows, int64_t B, int64_t T, int64_t C, float eps, int rms, int bias,
              int dtypes, int threads) {
    auto run = [=](auto dy, auto x) {
        using X = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
        using Y = std::remove_const_t<std::remove_pointer_t<decltype(dy)>>;
        const auto f = rms ? (bias ? tap<true, true, X, Y> : tap<true, false, X, Y>)
                           : (bias ? tap<false, true, X, Y> : tap<false, false, X, Y>);
        f(dy, x, rows, B, T, C, eps, threads);
    };
    if (dtypes == 0) run((const float*)dy, (const float*)x);
    if (dtypes == 1) run((const bf16*)dy, (const float*)x);
    if (dtypes == 2) run((const bf16*)dy, (const bf16*)x);
}

}
