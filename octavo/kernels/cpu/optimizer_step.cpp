// A step of Adam over blocks of one weight, in one pass and with the bits of reference/optimizer_step.py, which explains
// every formula here. Each block of up to 128 elements lies in one row; its numbers stay in the first-level cache.
#include "float_bits.h"

namespace {

constexpr int BLOCK = 128;  // granularity.py's
constexpr float LARGEST_ROOT = 0x1p63f;    // reference/optimizer_step.py's
constexpr float FLOAT16_FACTOR = 128.0f;  // reference/optimizer_state.py's
const float NOT_A_NUMBER = NAN;

enum FormatNumber : int32_t { IS_E4M3, IS_E5M2, IS_E4M4 };  // optimizer_step.py's FORMATS, in its order

// reference/optimizer_state.py's MASTER_KINDS, in its order
enum MasterKind : int32_t { WEIGHT, SPLIT32, SPLIT24, STOCHASTIC, FP8_SPLIT16, FP8_SPLIT24, FP8_FP16, FP8_FP32, FP8_STOCHASTIC };

}  // namespace

// Python packs these structures: library.py reads their declarations, whose lines are a type and names.
extern "C" {

struct Moment {
    void *data;          // [R, C]
    float *scale_inv;    // of codes: [R, blocks], or one number
    const float *scale;  // of the codes to be written, one number; null where each block finds its own
    int32_t kind;        // of float_bits.h
    int32_t format;      // of codes
    int32_t one_scale, root, stochastic, hybrid;
};

struct Master {
    void *weight, *low_bits;  // [R, C]
    const float *scale_inv;   // of codes: one number, or [ceil(R / 128), blocks]
    const float *scale;       // of the codes to be written: one number, or [R, blocks]
    float *block_amax;        // [R, blocks]: the largest weight written of each block; null for one scale
    int32_t kind, has_blocks, is_random;
};

struct Step {
    float one_minus_beta1, beta2, one_minus_beta2;
    float coupled_decay, decay_factor;  // the second multiplies the weight: 1 - lr * decoupled decay
    float divisor;                      // of the gradient
    float correction2_inv, eps;         // of the update's denominator, root * correction2_inv + eps
    float limit, minus_rate;            // of an update, up and down; by which it then moves the weight
    int32_t maximize;
};

struct Update {
    Master master;
    Moment first_moment, second_moment;
    const void *gradient;             // [R, C]
    const float *gradient_scale_inv;  // of codes: [R, blocks], or [ceil(R / 128)] for a vector that is a column
    int64_t rows, cols;
    int64_t first_row, first_col, row_length;  // where the matrix begins in the whole tensor, and its rows' length
    uint32_t moment_key, master_key;           // of random bits
    int32_t gradient_kind, gradient_by_rows;   // the second: its scale_inv is [R, blocks]
};

}  // extern "C"
SIZE_OF(Moment)
SIZE_OF(Master)
SIZE_OF(Step)
SIZE_OF(Update)

namespace {

// octavo/formats.py's of the same names
struct Format {
    int32_t mantissa_bits, bias, max_code, nan_code;
    bool is_signed, has_inf;
    float max, smallest_normal;
};
constexpr Format E4M3 = {3, 7, 0x7E, 0x7F, true, false, 448.0f, 0x1p-6f};
constexpr Format E5M2 = {2, 15, 0x7B, 0x7F, true, true, 57344.0f, 0x1p-14f};
constexpr Format E4M4 = {4, 7, 0xFE, 0xFF, false, false, 480.0f, 0x1p-6f};

// A block of a matrix, whose rows have ``blocks`` each.
struct Place {
    int64_t row, column, block, blocks;
    int64_t offset;  // of the block's first element
    int width;
    int64_t scale_index() const { return row * blocks + block; }               // in [R, blocks]
    int64_t tile_index() const { return row / BLOCK * blocks + block; }  // in [ceil(R / 128), blocks]
};

INLINE float decode(uint8_t code, const Format &f) {
    int32_t magnitude = f.is_signed ? code & 0x7F : code;
    float value = float_of(magnitude << (23 - f.mantissa_bits)) * float_of((254 - f.bias) << 23);
    value = magnitude > f.max_code ? (f.has_inf && magnitude == f.max_code + 1 ? INFINITY : NOT_A_NUMBER) : value;
    return float_of(bits_of(value) | (f.is_signed ? int32_t(uint32_t(code & 0x80) << 24) : 0));
}

// The code of y, whose magnitude has it in the upper of these bits.
INLINE uint8_t code_of(int32_t magnitude_bits, float y, const Format &f) {
    int32_t code = magnitude_bits >> (23 - f.mantissa_bits), sign = f.is_signed ? (bits_of(y) >> 24) & 0x80 : 0;
    code = code < 0 ? 0 : code > f.max_code ? f.max_code : code;
    return uint8_t(is_finite(y) ? code | sign : f.nan_code);
}

// To nearest, ties to even. kernels/moment_codes.py explains this and the next two.
INLINE uint8_t encode_nearest(float y, const Format &f) {
    float magnitude = std::fabs(y), power = float_of(bits_of(magnitude) & INFINITE);
    power = power < f.smallest_normal ? f.smallest_normal : power > f.max ? f.max : power;
    power *= float_of((127 + 23 - f.mantissa_bits) << 23);
    magnitude = (magnitude + power) - power;
    return code_of(bits_of(magnitude * float_of(f.bias << 23)), y, f);
}

// ``random``: 32 bits, of which rounding takes as many of the upper as it drops.
INLINE uint8_t encode_stochastic(float y, const Format &f, uint32_t random) {
    uint32_t bits = uint32_t(bits_of(std::fabs(y) * float_of(f.bias << 23)));
    return code_of(int32_t(bits + (random >> (9 + f.mantissa_bits))), y, f);
}

// To nearest, but stochastically where that leaves the magnitude that is ``stored``.
INLINE uint8_t encode_hybrid(float y, const Format &f, uint32_t random, uint8_t stored) {
    uint8_t nearest = encode_nearest(y, f), moved = encode_stochastic(y, f, random);
    return ((nearest ^ stored) & (f.is_signed ? 0x7F : 0xFF)) == 0 ? moved : nearest;
}

INLINE uint16_t to_bf16_stochastic(float x, uint32_t random) {
    return is_finite(x) ? uint16_t((uint32_t(bits_of(x)) + (random >> 16)) >> 16) : to_bf16(x);
}

// Of numbers below float16's largest.
INLINE uint16_t to_half_stochastic(float x, uint32_t random) {
    int32_t sign = (bits_of(x) >> 16) & 0x8000, fault = x == x ? 0x7C00 : 0x7E00;
    int32_t bits = (bits_of(std::fabs(x) * 0x1p-112f) + int32_t(random >> 19)) >> 13;
    return uint16_t(is_finite(x) ? bits | sign : fault | sign);
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

// Write kernels/step_numbers.py's ``random_bits`` of elements from this index on.
INLINE void random_bits(uint32_t *drawn, uint32_t key, int64_t first, int width) {
    for (int j = 0; j < width; j++) {
        uint32_t lower = uint32_t(first) + uint32_t(j), upper = uint32_t(uint64_t(first) >> 32) + (lower < uint32_t(first));
        drawn[j] = mixed(lower ^ upper * 0x9E3779B9u ^ key);
    }
}

INLINE void read_gradient(float *g, const Update &u, const Step &s, const Place &p) {
    const uint16_t *half = (const uint16_t *)u.gradient + p.offset;
    switch (u.gradient_kind) {
    case FLOAT32:
        std::memcpy(g, (const float *)u.gradient + p.offset, sizeof(float) * p.width);
        break;
    case BFLOAT16:
        for (int j = 0; j < p.width; j++) g[j] = from_bf16(half[j]);
        break;
    case FLOAT16:
        for (int j = 0; j < p.width; j++) g[j] = from_half(half[j]);
        break;
    case CODES: {
        const uint8_t *codes = (const uint8_t *)u.gradient + p.offset;
        float scale_inv = u.gradient_scale_inv[u.gradient_by_rows ? p.scale_index() : p.row / BLOCK];
        for (int j = 0; j < p.width; j++) g[j] = decode(codes[j], E4M3) * scale_inv;
        break;
    }
    }
    if (s.divisor != 1.0f)
        for (int j = 0; j < p.width; j++) g[j] = g[j] / s.divisor;
    if (s.maximize)
        for (int j = 0; j < p.width; j++) g[j] = -g[j];
}

template <const Format &f>
INLINE void read_codes(float *x, const uint8_t *codes, float scale_inv, const Moment &m, int width) {
    for (int j = 0; j < width; j++) x[j] = decode(codes[j], f) * scale_inv;
    if (m.root)
        for (int j = 0; j < width; j++) x[j] = x[j] * x[j];
}

// Write codes and, where each block finds its own, their scale_inv; return the block's amax.
template <const Format &f>
INLINE float write_codes(uint8_t *codes, const float *x, const Moment &m, const Place &p, const uint32_t *random) {
    float amax = finite_amax(x, p.width), scale = m.scale ? *m.scale : scale_from_amax(amax, f.max, false);
    if (!m.scale) m.scale_inv[m.one_scale ? 0 : p.scale_index()] = 1.0f / scale;
    if (m.hybrid)
        for (int j = 0; j < p.width; j++) codes[j] = encode_hybrid(x[j] * scale, f, random[j], codes[j]);
    else if (m.stochastic)
        for (int j = 0; j < p.width; j++) codes[j] = encode_stochastic(x[j] * scale, f, random[j]);
    else
        for (int j = 0; j < p.width; j++) codes[j] = encode_nearest(x[j] * scale, f);
    return amax;
}

INLINE void read_moment(float *x, const Moment &m, const Place &p) {
    if (m.kind == FLOAT32) std::memcpy(x, (const float *)m.data + p.offset, sizeof(float) * p.width);
    if (m.kind == BFLOAT16)
        for (int j = 0; j < p.width; j++) x[j] = from_bf16(((const uint16_t *)m.data)[p.offset + j]);
    if (m.kind != CODES) return;
    const uint8_t *codes = (const uint8_t *)m.data + p.offset;
    float scale_inv = m.scale_inv[m.one_scale ? 0 : p.scale_index()];
    switch (m.format) {
    case IS_E4M3: return read_codes<E4M3>(x, codes, scale_inv, m, p.width);
    case IS_E5M2: return read_codes<E5M2>(x, codes, scale_inv, m, p.width);
    case IS_E4M4: return read_codes<E4M4>(x, codes, scale_inv, m, p.width);
    }
}

// ``x``: the moment, or its root where codes are of that.
INLINE void write_moment(float *x, const Moment &m, const Place &p, const uint32_t *random, float *amax_written) {
    if (m.kind == FLOAT32) std::memcpy((float *)m.data + p.offset, x, sizeof(float) * p.width);
    if (m.kind == BFLOAT16) {
        uint16_t *half = (uint16_t *)m.data + p.offset;
        if (m.stochastic)
            for (int j = 0; j < p.width; j++) half[j] = to_bf16_stochastic(x[j], random[j]);
        else
            for (int j = 0; j < p.width; j++) {
                uint16_t nearest = to_bf16(x[j]);
                bool is_unchanged = ((nearest ^ half[j]) & 0x7FFF) == 0;
                half[j] = m.hybrid && is_unchanged ? to_bf16_stochastic(x[j], random[j]) : nearest;
            }
    }
    if (m.kind != CODES) return;
    uint8_t *codes = (uint8_t *)m.data + p.offset;
    float amax = 0.0f;
    switch (m.format) {
    case IS_E4M3: amax = write_codes<E4M3>(codes, x, m, p, random); break;
    case IS_E5M2: amax = write_codes<E5M2>(codes, x, m, p, random); break;
    case IS_E4M4: amax = write_codes<E4M4>(codes, x, m, p, random); break;
    }
    *amax_written = std::max(*amax_written, amax);
}

constexpr float EXPONENT = 0x1p-120f;  // gives a float32 the exponent bits of an E4M3 code

// Read masters of FP8_SPLIT16 and FP8_SPLIT24: a code, whose magnitude has BITS more bits by the remainder.
template <int BITS, class Remainder>
INLINE void read_split(float *w, const uint8_t *codes, const Remainder *remainders, float scale_inv, int width) {
    for (int j = 0; j < width; j++) {
        int32_t code = codes[j], magnitude = ((code & 0x7F) << BITS) + remainders[j];
        float value = float_of(magnitude << (20 - BITS)) * 0x1p120f;
        value = float_of(bits_of(value) | int32_t(uint32_t(code & 0x80) << 24)) * scale_inv;
        w[j] = (code & 0x7F) == 0x7F ? NOT_A_NUMBER : value;
    }
}

// Write such masters, rounded stochastically; return the largest, scaled.
template <int BITS, class Remainder>
INLINE float write_split(const float *w, uint8_t *codes, Remainder *remainders, float scale, const uint32_t *random, int width) {
    constexpr int dropped = 20 - BITS;
    int32_t magnitudes[BLOCK], largest = 0;
    for (int j = 0; j < width; j++) {
        float y = w[j] * scale;
        int32_t sign = (bits_of(y) >> 24) & 0x80, finite = -int32_t(is_finite(y));
        int32_t magnitude = (bits_of(std::fabs(y) * EXPONENT) + int32_t(random[j] >> (32 - dropped))) >> dropped;
        magnitude = magnitude < 0 ? 0 : magnitude > (0x7E << BITS) ? 0x7E << BITS : magnitude;
        magnitudes[j] = magnitude &= finite;
        int32_t code = (magnitude + (1 << (BITS - 1))) >> BITS;
        remainders[j] = Remainder(magnitude - (code << BITS));
        codes[j] = uint8_t(((code | sign) & finite) | (0x7F & ~finite));
    }
    for (int j = 0; j < width; j++) largest = magnitudes[j] > largest ? magnitudes[j] : largest;
    return float_of(largest << dropped) * 0x1p120f;
}

// Write a weight's upper 16 bits, to nearest, and the rest of its bits but for those that are ``dropped``, stochastically.
template <int dropped, class Remainder>
INLINE void write_bf16_split(const float *w, uint16_t *half, Remainder *remainders, const uint32_t *random, int width) {
    for (int j = 0; j < width; j++) {
        uint32_t bits = uint32_t(bits_of(w[j]));
        if (dropped) bits = (bits + (random[j] >> 24)) & 0xFFFFFF00u;
        int32_t upper = int32_t(bits + 0x8000u) >> 16, remainder = int32_t(bits - (uint32_t(upper) << 16));
        bool finite = is_finite(w[j]);
        half[j] = finite ? uint16_t(upper) : to_bf16(w[j]);
        remainders[j] = Remainder(finite ? remainder >> dropped : 0);
    }
}

INLINE void read_master(float *w, const Master &m, const Place &p) {
    const uint8_t *codes = (const uint8_t *)m.weight + p.offset;
    const uint16_t *half = (const uint16_t *)m.weight + p.offset;
    const int8_t *low8 = (const int8_t *)m.low_bits + p.offset;
    const int16_t *low16 = (const int16_t *)m.low_bits + p.offset;
    float scale_inv = 1.0f;
    if (m.scale_inv) scale_inv = m.scale_inv[m.has_blocks ? p.tile_index() : 0];
    int width = p.width;
    switch (m.kind) {
    case WEIGHT: std::memcpy(w, (const float *)m.weight + p.offset, sizeof(float) * width); break;
    case STOCHASTIC: for (int j = 0; j < width; j++) w[j] = from_bf16(half[j]); break;
    case SPLIT32:
        for (int j = 0; j < width; j++) w[j] = float_of(int32_t((uint32_t(half[j]) << 16) + uint32_t(int32_t(low16[j]))));
        break;
    case SPLIT24:
        for (int j = 0; j < width; j++)
            w[j] = float_of(int32_t((uint32_t(half[j]) << 16) + (uint32_t(int32_t(low8[j])) << 8)));
        break;
    case FP8_SPLIT16: read_split<8>(w, codes, low8, scale_inv, width); break;
    case FP8_SPLIT24: read_split<16>(w, codes, low16, scale_inv, width); break;
    case FP8_FP16: {
        float factor = scale_inv / FLOAT16_FACTOR;
        for (int j = 0; j < width; j++) w[j] = from_half(uint16_t(low16[j])) * factor;
        break;
    }
    case FP8_FP32: std::memcpy(w, (const float *)m.low_bits + p.offset, sizeof(float) * width); break;
    case FP8_STOCHASTIC: for (int j = 0; j < width; j++) w[j] = decode(codes[j], E4M3) * scale_inv; break;
    }
}

INLINE void write_master(float *w, const Master &m, const Place &p, const uint32_t *random, float *amax_written) {
    uint8_t *codes = (uint8_t *)m.weight + p.offset;
    uint16_t *half = (uint16_t *)m.weight + p.offset;
    int8_t *low8 = (int8_t *)m.low_bits + p.offset;
    int16_t *low16 = (int16_t *)m.low_bits + p.offset;
    int width = p.width;
    float scale = m.scale ? m.scale[m.has_blocks ? p.scale_index() : 0] : 1.0f, largest = 0.0f;
    switch (m.kind) {
    case WEIGHT: std::memcpy((float *)m.weight + p.offset, w, sizeof(float) * width); return;
    case STOCHASTIC:
        for (int j = 0; j < width; j++) half[j] = to_bf16_stochastic(w[j], random[j]);
        return;
    case SPLIT32: return write_bf16_split<0>(w, half, low16, random, width);
    case SPLIT24: return write_bf16_split<8>(w, half, low8, random, width);
    case FP8_SPLIT16: largest = write_split<8>(w, codes, low8, scale, random, width); break;
    case FP8_SPLIT24: largest = write_split<16>(w, codes, low16, scale, random, width); break;
    case FP8_FP16:
        for (int j = 0; j < width; j++) {
            codes[j] = encode_nearest(w[j] * scale, E4M3);
            low16[j] = int16_t(to_half_stochastic(w[j] * scale * FLOAT16_FACTOR, random[j]));
            w[j] = from_half(uint16_t(low16[j]));
        }
        largest = finite_amax(w, width) / FLOAT16_FACTOR;
        break;
    case FP8_FP32:
        for (int j = 0; j < width; j++) codes[j] = encode_nearest(w[j] * scale, E4M3);
        std::memcpy((float *)m.low_bits + p.offset, w, sizeof(float) * width);
        largest = finite_amax(w, width) * scale;
        break;
    case FP8_STOCHASTIC:
        for (int j = 0; j < width; j++) {
            codes[j] = encode_stochastic(w[j] * scale, E4M3, random[j]);
            w[j] = decode(codes[j], E4M3);
        }
        largest = finite_amax(w, width);
        break;
    }
    largest = largest * (1.0f / scale);
    if (m.block_amax) m.block_amax[p.scale_index()] = largest;
    else *amax_written = std::max(*amax_written, largest);
}

// Update moments and the weight by a gradient, as AdamStep's ``average`` and ``move`` do; write the roots of ``v``.
INLINE void move(float *w, float *m, float *v, float *root, float *g, const Step &s, int width) {
    if (s.coupled_decay != 0.0f) for (int j = 0; j < width; j++) g[j] = multiply_add(w[j], s.coupled_decay, g[j]);
    bool is_small = s.one_minus_beta1 < 0.5f;  // torch's two ways to interpolate
    float factor = is_small ? s.one_minus_beta1 : s.one_minus_beta1 - 1.0f;
    for (int j = 0; j < width; j++) m[j] = multiply_add(factor, g[j] - m[j], is_small ? m[j] : g[j]);
    for (int j = 0; j < width; j++) v[j] = multiply_add(s.one_minus_beta2 * g[j], g[j], v[j] * s.beta2);
    if (s.decay_factor != 1.0f) for (int j = 0; j < width; j++) w[j] = w[j] * s.decay_factor;
    for (int j = 0; j < width; j++) root[j] = std::sqrt(v[j]);
    for (int j = 0; j < width; j++) {
        float update = m[j] / (root[j] * s.correction2_inv + s.eps);
        update = update < -s.limit ? -s.limit : update > s.limit ? s.limit : update;
        w[j] = multiply_add(update, s.minus_rate, w[j]);
    }
}

// Clamp numbers to what codes can store, as AdamStep's ``saturate`` does; a NaN stays NaN.
INLINE void saturate(float *x, float lowest, float largest, int width) {
    for (int j = 0; j < width; j++) x[j] = x[j] < lowest ? lowest : x[j] > largest ? largest : x[j];
}

INLINE void update_block(const Update &u, const Step &s, const Place &p, float *amax_written) {
    float w[BLOCK], g[BLOCK], m[BLOCK], v[BLOCK], root[BLOCK];
    const Moment &first = u.first_moment, &second = u.second_moment;
    int width = p.width;
    read_master(w, u.master, p);
    read_gradient(g, u, s, p);
    read_moment(m, first, p);
    read_moment(v, second, p);
    move(w, m, v, root, g, s, width);
    float *stored_v = second.root ? root : v;
    if (first.kind == CODES) saturate(m, -LARGEST_ROOT, LARGEST_ROOT, width);
    if (second.kind == CODES) saturate(stored_v, -INFINITY, second.root ? LARGEST_ROOT : LARGEST_ROOT * LARGEST_ROOT, width);

    uint32_t drawn[BLOCK], swapped[BLOCK], drawn_for_master[BLOCK];
    int64_t index = (u.first_row + p.row) * u.row_length + u.first_col + p.column;  // in the whole tensor
    if (first.stochastic || second.stochastic || first.hybrid || second.hybrid) {
        random_bits(drawn, u.moment_key, index, width);
        for (int j = 0; j < width; j++) swapped[j] = drawn[j] << 16 | drawn[j] >> 16;
    }
    if (u.master.is_random) random_bits(drawn_for_master, u.master_key, index, width);
    write_moment(m, first, p, drawn, amax_written);
    write_moment(stored_v, second, p, swapped, amax_written + 1);
    write_master(w, u.master, p, drawn_for_master, amax_written + 2);
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
