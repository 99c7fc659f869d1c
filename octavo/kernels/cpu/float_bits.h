// Numbers of 32 and 16 bits by their bits: what the CPU's C++ shares. Nothing here reads or makes a subnormal number by
// arithmetic, so a CPU that is set to flush these changes nothing.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define INLINE inline __attribute__((always_inline))

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
