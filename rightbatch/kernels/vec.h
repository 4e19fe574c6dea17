// What the CPU kernels share: vectors of floats, from and to memory of floats or bf16, and threads. C++17 with the vector
// extensions of GCC and Clang, intrinsics only for what those lack.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX__
#include <immintrin.h>
#endif

#define ALWAYS_INLINE __attribute__((always_inline))   // for a lambda
#define INLINE inline ALWAYS_INLINE

namespace {

#if defined(__AVX512F__)
constexpr int kVecBytes = 64;
#elif defined(__AVX__)
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif
constexpr int W = kVecBytes / sizeof(float);

typedef float vec __attribute__((vector_size(kVecBytes)));
typedef uint32_t vec_u32 __attribute__((vector_size(kVecBytes)));
typedef int32_t vec_i32 __attribute__((vector_size(kVecBytes)));
typedef uint16_t vec_u16 __attribute__((vector_size(kVecBytes / 2)));
struct bf16 { uint16_t bits; };

template <class To, class From> INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ---- loads and stores: of a vec, or of one float; memory may be unaligned

#if defined(__AVX2__) && !defined(__AVX512F__)   // __builtin_convertvector takes twice as many instructions here
INLINE vec_u32 widen(vec_u16 h) { return bit_cast<vec_u32>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(h))); }
INLINE vec_u16 narrow(vec_u32 u) {
    const __m256i i = bit_cast<__m256i>(u);
    return bit_cast<vec_u16>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(i, i), 8)));
}
#else
INLINE vec_u32 widen(vec_u16 h) { return __builtin_convertvector(h, vec_u32); }
INLINE vec_u16 narrow(vec_u32 u) { return __builtin_convertvector(u, vec_u16); }
#endif

template <class V = vec> INLINE V load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

INLINE vec_u32 load_bits(const bf16* p) {
    vec_u16 half;
    std::memcpy(&half, p, sizeof half);
    return widen(half);
}

template <class V = vec> INLINE V load(const bf16* p) {
    if constexpr (std::is_same_v<V, float>) return bit_cast<float>(uint32_t(p->bits) << 16);
    else return bit_cast<vec>(load_bits(p) << 16);
}

// Stream: past the caches, to an aligned address.
template <bool Stream = false> INLINE void store(float* p, float v) { *p = v; }

template <bool Stream = false> INLINE void store(float* p, vec v) {
#if defined(__AVX512F__)
    if (Stream) return _mm512_stream_ps(p, bit_cast<__m512>(v));
#elif defined(__AVX__)
    if (Stream) return _mm256_stream_ps(p, bit_cast<__m256>(v));
#endif
    std::memcpy(p, &v, sizeof v);
}

INLINE uint32_t mask_of_numbers(float v) { return v == v ? ~0u : 0u; }
INLINE vec_u32 mask_of_numbers(vec v) { return bit_cast<vec_u32>(v == v); }

// Round to nearest even; the upper half of the result is the bf16. A NaN is left as it is: rounding could carry its mantissa
// into the sign, and its quiet bit, set because the value comes out of arithmetic, is among the bits that stay. The
// instruction for it, where there is one, does the same, but takes a number below 1e-38 for 0.
template <class U, class V> INLINE U rounded(V v) {
    const U u = bit_cast<U>(v), is_number = mask_of_numbers(v);
    return u + ((0x7fffu + ((u >> 16) & 1u)) & is_number);
}

template <bool Stream = false> INLINE void store(bf16* p, float v) { p->bits = uint16_t(rounded<uint32_t>(v) >> 16); }

template <bool Stream = false> INLINE void store(bf16* p, vec v) {
#if defined(__AVX512BF16__)
    const __m256i half = bit_cast<__m256i>(_mm512_cvtneps_pbh(bit_cast<__m512>(v)));
#else
    const vec_u16 half = narrow(rounded<vec_u32>(v) >> 16);
#endif
#if defined(__AVX512F__)
    if (Stream) return _mm256_stream_si256((__m256i*)p, bit_cast<__m256i>(half));
#elif defined(__AVX__)
    if (Stream) return _mm_stream_si128((__m128i*)p, bit_cast<__m128i>(half));
#endif
    std::memcpy(p, &half, sizeof half);
}

// ---- threads

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

}  // namespace
