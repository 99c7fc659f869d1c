// Numbers of 32 and 16 bits by their bits: what the CPU's C++ shares. No format's number is read by arithmetic of subnormal
// numbers, so a CPU that is set to flush these reads the same; scales of such amaxes are then as torch's, of 0.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define INLINE inline __attribute__((always_inline))
// Export the size of a structure that Python packs, which library.py compares with what it read of the declaration.
#define SIZE_OF(structure) extern "C" int octavo_size_of_##structure() { return sizeof(structure); }

namespace {

constexpr int32_t INFINITE = 0x7F800000, MAGNITUDE = 0x7FFFFFFF;

inline int32_t bits_of(float x) { int32_t bits; std::memcpy(&bits, &x, 4); return bits; }
inline float float_of(int32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline bool is_finite(float x) { return (bits_of(x) & INFINITE) != INFINITE; }
inline float from_bf16(uint16_t x) { return float_of(int32_t(uint32_t(x) << 16)); }
inline uint16_t to_bf16(float x) {
    uint32_t bits = uint32_t(bits_of(x));
    uint16_t rounded = uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    return x == x ? rounded : 0x7FC0;
}
// a * b + c as torch's kernels for this CPU compute it: rounded once, but twice on x86 where they may not use FMA, which
// library.py then keeps from the compiler too.
INLINE float multiply_add(float a, float b, float c) {
#if defined(__x86_64__) && !defined(__FMA__)
    return a * b + c;
#else
    return std::fma(a, b, c);
#endif
}
// Return numerics.scale_from_amax of one number; ``limit``: divided by 2^margin already.
INLINE float scale_from_amax(float amax, float limit, bool power_of_two) {
    float scale = limit / amax;
    scale = float_of(bits_of(scale) & (power_of_two ? INFINITE : -1));
    scale = scale < 0x1p-126f ? 0x1p-126f : scale > 0x1p126f ? 0x1p126f : scale;
    return amax > 0.0f ? scale : 1.0f;
}
// A small float's magnitude, shifted to a float32's mantissa, whose exponents are ``offset`` less than a float32's.
INLINE int32_t widened(int32_t magnitude, int32_t offset) {
    int32_t normal = magnitude + (offset << 23);
    float subnormal = float_of(normal + (1 << 23)) - float_of((offset + 1) << 23);
    return magnitude < 1 << 23 ? bits_of(subnormal) : normal;
}
INLINE float from_half(uint16_t x) {
    int32_t magnitude = int32_t(x & 0x7FFF) << 13;
    int32_t bits = (x & 0x7C00) == 0x7C00 ? magnitude | INFINITE : widened(magnitude, 112);
    return float_of(bits | int32_t(uint32_t(x & 0x8000) << 16));
}

// What a matrix holds, and its rows.
struct Float32 {
    using Bits = uint32_t;
    static constexpr Bits magnitude = MAGNITUDE, infinite = INFINITE;
    static INLINE float value(Bits x) { return float_of(int32_t(x)); }
    static INLINE Bits rounded(float x) { return Bits(bits_of(x)); }
};
struct BFloat16 {
    using Bits = uint16_t;
    static constexpr Bits magnitude = 0x7FFF, infinite = 0x7F80;
    static INLINE float value(Bits x) { return from_bf16(x); }
    static INLINE Bits rounded(float x) { return to_bf16(x); }
};
struct Half {
    using Bits = uint16_t;
    static constexpr Bits magnitude = 0x7FFF, infinite = 0x7C00;
    static INLINE float value(Bits x) { return from_half(x); }
};
template <class X> struct Matrix {
    using Kind = X;
    typename X::Bits *data;  // where row 0 is, though it may hold others alone
    int64_t stride;
    typename X::Bits *row(int64_t i) const { return data + i * stride; }
};
enum Kind : int32_t { FLOAT32, BFLOAT16, FLOAT16, CODES };  // codes.py's KINDS, and E4M3's codes as bytes
template <class Work> auto on_kind(int kind, void *x, int64_t stride, Work work) {
    if (kind == FLOAT32) return work(Matrix<Float32>{(uint32_t *)x, stride});
    if (kind == BFLOAT16) return work(Matrix<BFloat16>{(uint16_t *)x, stride});
    return work(Matrix<Half>{(uint16_t *)x, stride});
}

// lowbias32 of kernels/step_numbers.py.
INLINE uint32_t mixed(uint32_t x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

// Call ``work(share, first, last)`` on shares of what is ``from`` to ``to``, of whole units. torch's own threads do so:
// they wait for its next operation on their processors, where others would have to wait for them.
template <class Work> void in_threads(int64_t threads, int64_t from, int64_t to, int64_t unit, Work work) {
    using Team = void(void (*)(void *), void *, unsigned, unsigned);  // OpenMP's, where it is GNU's or compatible
    static Team *const team = (Team *)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    auto end = [=](int64_t share) { return std::min(from + (to - from + unit - 1) / unit * share / threads * unit, to); };
    std::atomic<int64_t> next(0);
    auto take = [&] { for (int64_t share; (share = next++) < threads;) work(share, end(share), end(share + 1)); };
    if (threads == 1) return take();
    if (team) return team([](void *given) { (*(decltype(take) *)given)(); }, &take, 0, 0);
    std::vector<std::thread> others;
    for (int64_t share = 1; share < threads; share++) others.emplace_back(take);
    take();
    for (auto &other : others) other.join();
}

}  // namespace
