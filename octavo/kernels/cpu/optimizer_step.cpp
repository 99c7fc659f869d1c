// A step of Adam over blocks of one weight, in one pass and with the bits of reference/optimizer_step.py, which explains
// every formula here. Each block of up to 128 elements lies in one row; its numbers stay in the first-level cache.
#include "float_bits.h"

namespace {

constexpr int BLOCK = 128;
constexpr float LARGEST_ROOT = 0x1p63f, FLOAT16_FACTOR = 128.0f;
const float NOT_A_NUMBER = NAN;

// reference/optimizer_state.py's MASTER_KINDS, in its order
enum MasterKind : int32_t { WEIGHT, SPLIT32, SPLIT24, STOCHASTIC, FP8_SPLIT16, FP8_SPLIT24, FP8_FP16, FP8_FP32, FP8_STOCHASTIC };

}  // namespace

extern "C" {

struct Format {
    int32_t mantissa_bits, bias, max_code, nan_code, is_signed, has_inf;
    float max, smallest_normal;
};

struct Moment {
    void *data;         // [R, C]
    float *scale_inv;   // of codes: [R, blocks], or one number
    const float *scale; // of the codes to be written, one number; null where each block finds its own
    int32_t kind, one_scale, root, stochastic, hybrid;
    Format format;
};

struct Master {
    void *weight, *rest;        // [R, C]
    const float *scale_inv;     // of codes: one number, or [ceil(R / 128), blocks]
    const float *scale;         // of the codes to be written: one number, or [R, blocks]
    float *block_amax;          // [R, blocks]: the largest weight written of each block; null for one scale
    int32_t kind, has_blocks, is_random;
};

struct Step {
    float weight1, square, beta2, kept, coupled_decay, divisor, correction2_inv, eps, limit, rate;
    float maximize; // 1 or 0
};

struct Update {
    Master master;
    Moment moments[2];
    const void *gradient;            // [R, C]
    const float *gradient_scale_inv; // of codes: [R, blocks], or [ceil(R / 128)] for a vector that is a column
    int64_t rows, cols, first_row, first_col, row_length;
    uint32_t moment_key, master_key;
    int32_t gradient_kind, gradient_by_rows;
};

}  // extern "C"

namespace {

constexpr Format E4M3 = {3, 7, 0x7E, 0x7F, 1, 0, 448.0f, 0x1p-6f}, E4M4 = {4, 7, 0xFE, 0xFF, 0, 0, 496.0f, 0x1p-6f};

struct Place {
    int64_t row, column, block, blocks, at; // ``at``: of the first element
    int width;
};

INLINE float decode(uint8_t code, const Format &f) {
    int32_t magnitude = f.is_signed ? code & 0x7F : code;
    float value = float_of(magnitude << (23 - f.mantissa_bits)) * float_of((254 - f.bias) << 23);
    value = magnitude > f.max_code ? (f.has_inf && magnitude == f.max_code + 1 ? INFINITY : NOT_A_NUMBER) : value;
    return float_of(bits_of(value) | (f.is_signed ? int32_t(uint32_t(code & 0x80) << 24) : 0));
}

// ``random``: 32 bits, of which rounding takes as many of the upper as it drops.
INLINE uint8_t encode(float y, const Format &f, bool stochastic, uint32_t random) {
    int dropped = 23 - f.mantissa_bits;
    int32_t sign = f.is_signed ? (bits_of(y) >> 24) & 0x80 : 0;
    bool finite = is_finite(y);
    y = std::fabs(y);
    if (!stochastic) {
        float power = float_of(bits_of(y) & INFINITE);
        power = power < f.smallest_normal ? f.smallest_normal : power > f.max ? f.max : power;
        power *= float_of((127 + dropped) << 23);
        y = (y + power) - power;
    }
    int32_t bits = bits_of(y * float_of(f.bias << 23));
    if (stochastic) bits = int32_t(uint32_t(bits) + (random >> (32 - dropped)));
    bits >>= dropped;
    bits = bits < 0 ? 0 : bits > f.max_code ? f.max_code : bits;
    return uint8_t(finite ? bits | sign : f.nan_code);
}

// To nearest, but stochastically where that leaves the magnitude that is ``stored``.
INLINE uint8_t encode_hybrid(float y, const Format &f, uint32_t random, uint8_t stored) {
    uint8_t nearest = encode(y, f, false, 0), moved = encode(y, f, true, random);
    return ((nearest ^ stored) & (f.is_signed ? 0x7F : 0xFF)) == 0 ? moved : nearest;
}

INLINE uint16_t to_bf16_stochastic(float x, uint32_t random) {
    return is_finite(x) ? uint16_t((uint32_t(bits_of(x)) + (random >> 16)) >> 16) : to_bf16(x);
}

INLINE float finite_amax(const float *values, int width) {
    int32_t largest = 0;
    for (int j = 0; j < width; j++) {
        int32_t magnitude = bits_of(values[j]) & MAGNITUDE;
        magnitude = magnitude < INFINITE ? magnitude : 0;
        largest = magnitude > largest ? magnitude : largest;
    }
    return float_of(largest);
}

inline float scale_from_amax(float amax, float limit) {
    float scale = limit / amax;
    scale = scale < 0x1p-126f ? 0x1p-126f : scale > 0x1p126f ? 0x1p126f : scale;
    return amax > 0 ? scale : 1.0f;
}

INLINE void random_bits(uint32_t *drawn, uint32_t key, int64_t first, int width) {
    for (int j = 0; j < width; j++) {
        uint32_t lower = uint32_t(first) + uint32_t(j), upper = uint32_t(uint64_t(first) >> 32) + (lower < uint32_t(first));
        drawn[j] = mixed(lower ^ upper * 0x9E3779B9u ^ key);
    }
}

INLINE void read_gradient(float *g, const Update &u, const Step &s, const Place &p) {
    if (u.gradient_kind == FLOAT32) std::memcpy(g, (const float *)u.gradient + p.at, sizeof(float) * p.width);
    const uint16_t *half = (const uint16_t *)u.gradient + p.at;
    if (u.gradient_kind == BFLOAT16) for (int j = 0; j < p.width; j++) g[j] = from_bf16(half[j]);
    if (u.gradient_kind == FLOAT16) for (int j = 0; j < p.width; j++) g[j] = from_half(half[j]);
    if (u.gradient_kind == CODES) {
        const uint8_t *codes = (const uint8_t *)u.gradient + p.at;
        float scale_inv = u.gradient_scale_inv[u.gradient_by_rows ? p.row * p.blocks + p.block : p.row / BLOCK];
        for (int j = 0; j < p.width; j++) g[j] = decode(codes[j], E4M3) * scale_inv;
    }
    if (s.divisor != 1.0f) for (int j = 0; j < p.width; j++) g[j] = g[j] / s.divisor;
    if (s.maximize) for (int j = 0; j < p.width; j++) g[j] = -g[j];
}

template <int FORMAT> inline Format with_constants(const Format &f) {
    return FORMAT == 1 ? E4M3 : FORMAT == 2 ? E4M4 : f;
}

template <int FORMAT> INLINE void read_codes(float *x, const uint8_t *codes, float scale_inv, const Moment &m, int width) {
    const Format f = with_constants<FORMAT>(m.format);
    for (int j = 0; j < width; j++) x[j] = decode(codes[j], f) * scale_inv;
    if (m.root) for (int j = 0; j < width; j++) x[j] = x[j] * x[j];
}

template <int FORMAT>
INLINE void write_codes(uint8_t *codes, const float *x, float scale, const Moment &m, const uint32_t *random, int width) {
    const Format f = with_constants<FORMAT>(m.format);
    if (m.hybrid) for (int j = 0; j < width; j++) codes[j] = encode_hybrid(x[j] * scale, f, random[j], codes[j]);
    else if (m.stochastic) for (int j = 0; j < width; j++) codes[j] = encode(x[j] * scale, f, true, random[j]);
    else for (int j = 0; j < width; j++) codes[j] = encode(x[j] * scale, f, false, 0);
}

inline int format_number(const Format &f) {
    return f.mantissa_bits == 3 ? 1 : f.mantissa_bits == 4 ? 2 : 0;
}

INLINE void read_moment(float *x, const Moment &m, const Place &p) {
    if (m.kind == FLOAT32) std::memcpy(x, (const float *)m.data + p.at, sizeof(float) * p.width);
    if (m.kind == BFLOAT16) for (int j = 0; j < p.width; j++) x[j] = from_bf16(((const uint16_t *)m.data)[p.at + j]);
    if (m.kind != CODES) return;
    const uint8_t *codes = (const uint8_t *)m.data + p.at;
    float scale_inv = m.scale_inv[m.one_scale ? 0 : p.row * p.blocks + p.block];
    int format = format_number(m.format);
    (format == 1 ? read_codes<1> : format == 2 ? read_codes<2> : read_codes<0>)(x, codes, scale_inv, m, p.width);
}

// ``x``: the moment, or its root where codes are of that.
INLINE void write_moment(float *x, const Moment &m, const Place &p, const uint32_t *random, float *amax_written) {
    if (m.kind == FLOAT32) std::memcpy((float *)m.data + p.at, x, sizeof(float) * p.width);
    if (m.kind == BFLOAT16) {
        uint16_t *half = (uint16_t *)m.data + p.at;
        if (m.stochastic) for (int j = 0; j < p.width; j++) half[j] = to_bf16_stochastic(x[j], random[j]);
        else for (int j = 0; j < p.width; j++) {
            uint16_t nearest = to_bf16(x[j]);
            bool is_unchanged = ((nearest ^ half[j]) & 0x7FFF) == 0;
            half[j] = m.hybrid && is_unchanged ? to_bf16_stochastic(x[j], random[j]) : nearest;
        }
    }
    if (m.kind != CODES) return;
    float amax = finite_amax(x, p.width), scale = m.scale ? *m.scale : scale_from_amax(amax, m.format.max);
    *amax_written = amax > *amax_written ? amax : *amax_written;
    if (!m.scale) m.scale_inv[m.one_scale ? 0 : p.row * p.blocks + p.block] = 1.0f / scale;
    uint8_t *codes = (uint8_t *)m.data + p.at;
    int format = format_number(m.format);
    (format == 1 ? write_codes<1> : format == 2 ? write_codes<2> : write_codes<0>)(codes, x, scale, m, random, p.width);
}

constexpr float EXPONENT = 0x1p-120f;  // gives a float32 the exponent bits of an E4M3 code

template <int BITS, class Rest>
INLINE void read_split(float *w, const uint8_t *codes, const Rest *rest, float scale_inv, int width) {
    for (int j = 0; j < width; j++) {
        int32_t code = codes[j], magnitude = ((code & 0x7F) << BITS) + rest[j];
        float value = float_of(magnitude << (20 - BITS)) * 0x1p120f;
        value = float_of(bits_of(value) | int32_t(uint32_t(code & 0x80) << 24)) * scale_inv;
        w[j] = (code & 0x7F) == 0x7F ? NOT_A_NUMBER : value;
    }
}

template <int BITS, class Rest>
INLINE float write_split(const float *w, uint8_t *codes, Rest *rest, float scale, const uint32_t *random, int width) {
    constexpr int dropped = 20 - BITS;
    int32_t magnitudes[BLOCK], largest = 0;
    for (int j = 0; j < width; j++) {
        float y = w[j] * scale;
        int32_t sign = (bits_of(y) >> 24) & 0x80, finite = -int32_t(is_finite(y));
        int32_t magnitude = (bits_of(std::fabs(y) * EXPONENT) + int32_t(random[j] >> (32 - dropped))) >> dropped;
        magnitude = magnitude < 0 ? 0 : magnitude > (0x7E << BITS) ? 0x7E << BITS : magnitude;
        magnitudes[j] = magnitude &= finite;
        int32_t code = (magnitude + (1 << (BITS - 1))) >> BITS;
        rest[j] = Rest(magnitude - (code << BITS));
        codes[j] = uint8_t(((code | sign) & finite) | (0x7F & ~finite));
    }
    for (int j = 0; j < width; j++) largest = magnitudes[j] > largest ? magnitudes[j] : largest;
    return float_of(largest << dropped) * 0x1p120f;
}

INLINE void read_master(float *w, const Master &m, const Place &p) {
    const uint8_t *codes = (const uint8_t *)m.weight + p.at;
    const uint16_t *half = (const uint16_t *)m.weight + p.at;
    const int8_t *rest8 = (const int8_t *)m.rest + p.at;
    const int16_t *rest16 = (const int16_t *)m.rest + p.at;
    float scale_inv = 1.0f;
    if (m.scale_inv) scale_inv = m.scale_inv[m.has_blocks ? p.row / BLOCK * p.blocks + p.block : 0];
    int width = p.width;
    switch (m.kind) {
    case WEIGHT: std::memcpy(w, (const float *)m.weight + p.at, sizeof(float) * width); break;
    case STOCHASTIC: for (int j = 0; j < width; j++) w[j] = from_bf16(half[j]); break;
    case SPLIT32:
        for (int j = 0; j < width; j++) w[j] = float_of(int32_t((uint32_t(half[j]) << 16) + uint32_t(int32_t(rest16[j]))));
        break;
    case SPLIT24:
        for (int j = 0; j < width; j++)
            w[j] = float_of(int32_t((uint32_t(half[j]) << 16) + (uint32_t(int32_t(rest8[j])) << 8)));
        break;
    case FP8_SPLIT16: read_split<8>(w, codes, rest8, scale_inv, width); break;
    case FP8_SPLIT24: read_split<16>(w, codes, rest16, scale_inv, width); break;
    case FP8_FP16: {
        float factor = scale_inv / FLOAT16_FACTOR;
        for (int j = 0; j < width; j++) w[j] = from_half(uint16_t(rest16[j])) * factor;
        break;
    }
    case FP8_FP32: std::memcpy(w, (const float *)m.rest + p.at, sizeof(float) * width); break;
    case FP8_STOCHASTIC: for (int j = 0; j < width; j++) w[j] = decode(codes[j], E4M3) * scale_inv; break;
    }
}

INLINE void write_master(float *w, const Master &m, const Place &p, const uint32_t *random, float *amax_written) {
    uint8_t *codes = (uint8_t *)m.weight + p.at;
    uint16_t *half = (uint16_t *)m.weight + p.at;
    int8_t *rest8 = (int8_t *)m.rest + p.at;
    int16_t *rest16 = (int16_t *)m.rest + p.at;
    int width = p.width;
    float scale = m.scale ? m.scale[m.has_blocks ? p.row * p.blocks + p.block : 0] : 1.0f, largest = 0.0f;
    switch (m.kind) {
    case WEIGHT: std::memcpy((float *)m.weight + p.at, w, sizeof(float) * width); return;
    case STOCHASTIC:
        for (int j = 0; j < width; j++) half[j] = to_bf16_stochastic(w[j], random[j]);
        return;
    case SPLIT32:
    case SPLIT24:
        for (int j = 0; j < width; j++) {
            uint32_t bits = uint32_t(bits_of(w[j]));
            if (m.kind == SPLIT24) bits = (bits + (random[j] >> 24)) & 0xFFFFFF00u;
            int32_t upper = int32_t(bits + 0x8000u) >> 16, rest = int32_t(bits - (uint32_t(upper) << 16));
            bool finite = is_finite(w[j]);
            half[j] = finite ? uint16_t(upper) : to_bf16(w[j]);
            rest = finite ? rest : 0;
            if (m.kind == SPLIT32) rest16[j] = int16_t(rest);
            else rest8[j] = int8_t(rest >> 8);
        }
        return;
    case FP8_SPLIT16: largest = write_split<8>(w, codes, rest8, scale, random, width); break;
    case FP8_SPLIT24: largest = write_split<16>(w, codes, rest16, scale, random, width); break;
    case FP8_FP16:
        for (int j = 0; j < width; j++) {
            float y = w[j] * scale;
            codes[j] = encode(y, E4M3, false, 0);
            y = y * FLOAT16_FACTOR;
            int32_t sign = (bits_of(y) >> 16) & 0x8000;
            int32_t bits = (bits_of(std::fabs(y) * 0x1p-112f) + int32_t(random[j] >> 19)) >> 13;
            int32_t fault = y == y ? 0x7C00 : 0x7E00;
            rest16[j] = int16_t(is_finite(y) ? bits | sign : fault | sign);
            w[j] = from_half(uint16_t(rest16[j]));
        }
        largest = finite_amax(w, width) / FLOAT16_FACTOR;
        break;
    case FP8_FP32:
        for (int j = 0; j < width; j++) codes[j] = encode(w[j] * scale, E4M3, false, 0);
        std::memcpy((float *)m.rest + p.at, w, sizeof(float) * width);
        largest = finite_amax(w, width) * scale;
        break;
    case FP8_STOCHASTIC:
        for (int j = 0; j < width; j++) {
            codes[j] = encode(w[j] * scale, E4M3, true, random[j]);
            w[j] = decode(codes[j], E4M3);
        }
        largest = finite_amax(w, width);
        break;
    }
    largest = largest * (1.0f / scale);
    if (m.block_amax) m.block_amax[p.row * p.blocks + p.block] = largest;
    else *amax_written = largest > *amax_written ? largest : *amax_written;
}

INLINE void update_block(const Update &u, const Step &s, const Place &p, float *amax_written) {
    float w[BLOCK], g[BLOCK], m[BLOCK], v[BLOCK], root[BLOCK];
    uint32_t drawn[BLOCK], swapped[BLOCK], of_master[BLOCK];
    int width = p.width;
    read_master(w, u.master, p);
    read_gradient(g, u, s, p);
    if (s.coupled_decay != 0.0f) for (int j = 0; j < width; j++) g[j] = multiply_add(w[j], s.coupled_decay, g[j]);
    read_moment(m, u.moments[0], p);
    read_moment(v, u.moments[1], p);
    bool is_small = s.weight1 < 0.5f;  // torch's two ways to interpolate
    float factor = is_small ? s.weight1 : s.weight1 - 1.0f;
    for (int j = 0; j < width; j++) m[j] = multiply_add(factor, g[j] - m[j], is_small ? m[j] : g[j]);
    for (int j = 0; j < width; j++) v[j] = multiply_add(s.square * g[j], g[j], v[j] * s.beta2);
    if (s.kept != 1.0f) for (int j = 0; j < width; j++) w[j] = w[j] * s.kept;
    for (int j = 0; j < width; j++) root[j] = std::sqrt(v[j]);
    for (int j = 0; j < width; j++) {
        float update = m[j] / (root[j] * s.correction2_inv + s.eps);
        update = update < -s.limit ? -s.limit : update > s.limit ? s.limit : update;
        w[j] = multiply_add(update, s.rate, w[j]);
    }
    if (u.moments[0].kind == CODES)
        for (int j = 0; j < width; j++) m[j] = m[j] < -LARGEST_ROOT ? -LARGEST_ROOT : m[j] > LARGEST_ROOT ? LARGEST_ROOT : m[j];
    float largest = u.moments[1].root ? LARGEST_ROOT : LARGEST_ROOT * LARGEST_ROOT, *second = u.moments[1].root ? root : v;
    if (u.moments[1].kind == CODES) for (int j = 0; j < width; j++) second[j] = second[j] > largest ? largest : second[j];
    int64_t first = (u.first_row + p.row) * u.row_length + u.first_col + p.column;
    if (u.moments[0].stochastic || u.moments[1].stochastic || u.moments[0].hybrid || u.moments[1].hybrid) {
        random_bits(drawn, u.moment_key, first, width);
        for (int j = 0; j < width; j++) swapped[j] = drawn[j] << 16 | drawn[j] >> 16;
    }
    if (u.master.is_random) random_bits(of_master, u.master_key, first, width);
    write_moment(m, u.moments[0], p, drawn, amax_written);
    write_moment(second, u.moments[1], p, swapped, amax_written + 1);
    write_master(w, u.master, p, of_master, amax_written + 2);
}

}  // namespace

// Update a weight, block by block along its rows. amax_written [3]: the largest values written to both moments and to a weight
// with one scale.
extern "C" void octavo_adam(const Update *update, const Step *step, int64_t threads, float *amax_written) {
    int64_t blocks = (update->cols + BLOCK - 1) / BLOCK;
    std::vector<float> shares(3 * threads);
    in_threads(threads, 0, update->rows * blocks, 1, [&](int64_t share, int64_t from, int64_t to) {
        for (int64_t number = from; number < to; number++) {
            int64_t row = number / blocks, block = number % blocks, left = update->cols - block * BLOCK;
            Place place = {row, block * BLOCK, block, blocks, row * update->cols + block * BLOCK, BLOCK};
            if (left < BLOCK) place.width = int(left);
            update_block(*update, *step, place, &shares[3 * share]);
        }
    });
    for (size_t i = 0; i < shares.size(); i++) amax_written[i % 3] = std::max(amax_written[i % 3], shares[i]);
}
