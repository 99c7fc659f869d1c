// Casts to NVFP4, and back, with the bits of reference/nvfp4.py and reference/codes.py.
#include "float_bits.h"

extern "C" {

// A matrix [lanes, terms], contraction last, whose blocks are 16 terms of one lane, or of 16. It may lie transposed.
struct Packed {
    uint8_t *codes, *transposed;  // codes [lanes, terms' / 2] and, of blocks of 16 lanes, [terms, lanes' / 2], or null
    uint16_t *scale_inv;     // bfloat16, one number a block
    const float *amax;       // of the whole matrix, one number
    const float *delayed_scale;  // the outer scale, or 0 where amax makes it; null: amax does
    int64_t rows, cols, codes_stride, transposed_stride, scale_row_stride, scale_col_stride;  // rows and cols: as the matrix lies
    int64_t block_lanes, lanes_are_columns;
    int64_t rotation, seed;          // -1: none
    int64_t first_lane, first_term;  // in the whole matrix
    double limit;                    // what amax is brought to
};

}  // extern "C"
SIZE_OF(Packed)

namespace {

constexpr int BLOCK = 16;
constexpr int64_t BAND = 128, WIDTH = 64;  // rows and columns that are cast at a time: a cache line of codes of a column
constexpr float E2M1_MAX = 6.0f, E4M3_MAX = 448.0f;
constexpr uint32_t ODD = 0x9E3779B1;  // of reference/nvfp4.py's random bits

template <class T> struct alignas(64) Panel { T at[BLOCK][BLOCK]; };  // [term, lane], but where rows are loaded

typedef float Four __attribute__((vector_size(16)));
#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Places __attribute__((vector_size(16)));
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, Places{__VA_ARGS__})
#endif

// Exchange rows and columns of numbers of 32 bits, 4 x 4 at a time.
template <class T> INLINE void transpose(Panel<T> &out, const Panel<T> &in) {
    static_assert(sizeof(T) == sizeof(float), "four lie in a vector");
    for (int i = 0; i < BLOCK; i += 4)
        for (int j = 0; j < BLOCK; j += 4) {
            Four r[4], s[4];
            for (int k = 0; k < 4; k++) std::memcpy(r + k, &in.at[i + k][j], sizeof r[k]);
            s[0] = SHUFFLED(r[0], r[1], 0, 4, 1, 5), s[1] = SHUFFLED(r[0], r[1], 2, 6, 3, 7);
            s[2] = SHUFFLED(r[2], r[3], 0, 4, 1, 5), s[3] = SHUFFLED(r[2], r[3], 2, 6, 3, 7);
            r[0] = SHUFFLED(s[0], s[2], 0, 1, 4, 5), r[1] = SHUFFLED(s[0], s[2], 2, 3, 6, 7);
            r[2] = SHUFFLED(s[1], s[3], 0, 1, 4, 5), r[3] = SHUFFLED(s[1], s[3], 2, 3, 6, 7);
            for (int k = 0; k < 4; k++) std::memcpy(&out.at[j + k][i], r + k, sizeof r[k]);
        }
}

template <class X> INLINE void load(Panel<float> &out, const Matrix<X> &m, int64_t row, int64_t col, int height, int width) {
    if (height == BLOCK && width == BLOCK) {
        for (int i = 0; i < BLOCK; i++) {
            const typename X::Bits *x = m.row(row + i) + col;
            for (int j = 0; j < BLOCK; j++) out.at[i][j] = X::value(x[j]);
        }
        return;
    }
    std::memset(&out, 0, sizeof out);
    for (int i = 0; i < height; i++)
        for (int j = 0; j < width; j++) out.at[i][j] = X::value(m.row(row + i)[col + j]);
}

// Replace each two terms that are ``width`` apart by their sum and their difference.
template <int width> INLINE void add_and_subtract(Panel<float> &v) {
    for (int first = 0; first < BLOCK; first += 2 * width)
        for (int i = first; i < first + width; i++) {
            float *__restrict low = v.at[i], *__restrict high = v.at[i + width];
            for (int j = 0; j < BLOCK; j++) {
                float sum = low[j] + high[j], difference = low[j] - high[j];
                low[j] = sum, high[j] = difference;
            }
        }
}

// Multiply each lane by the matrix of reference/nvfp4.py's ``rotated``, in its order.
INLINE void rotate(Panel<float> &v, int64_t signs) {
    for (int i = 0; i < BLOCK; i++) {
        int32_t sign = int32_t(uint32_t(signs >> i & 1) << 31);
        for (int j = 0; j < BLOCK; j++) v.at[i][j] = float_of(bits_of(v.at[i][j]) ^ sign);
    }
    add_and_subtract<1>(v), add_and_subtract<2>(v), add_and_subtract<4>(v), add_and_subtract<8>(v);
    for (int i = 0; i < BLOCK; i++)
        for (int j = 0; j < BLOCK; j++) {
            float x = v.at[i][j] * 0.25f;
            uint32_t bits = uint32_t(bits_of(x));  // as to_bf16 rounds
            v.at[i][j] = x == x ? float_of(int32_t((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000)) : NAN;
        }
}

// Write the 8 random bits of each term to the bytes of words [term / 4, lane].
INLINE void draw(uint32_t (*words)[BLOCK], const Panel<float> &v, const Packed &s, int64_t lane, int64_t block) {
    alignas(64) uint32_t key[BLOCK] = {};
    for (int i = 0; i < BLOCK; i++)
        for (int j = 0; j < BLOCK; j++) key[j] += mixed(uint32_t(bits_of(v.at[i][j] + 0.0f)) + uint32_t(i) * ODD);
    const uint32_t first = uint32_t(lane + s.first_lane), number = uint32_t(block + s.first_term / BLOCK);
    for (int j = 0; j < BLOCK; j++)
        key[j] = mixed(mixed(key[j] ^ uint32_t(s.seed)) + (first + uint32_t(j)) * ODD) ^ number;
    for (int i = 0; i < BLOCK / 4; i++)
        for (int j = 0; j < BLOCK; j++) words[i][j] = mixed(key[j] + uint32_t(i) * ODD);
}

// Return numerics.nvfp4_scale_inv of a block. A number is rounded to E4M3 where 2^20 times its power of two is added.
INLINE float scale_inv_of(float amax, float outer) {
    int32_t inner = bits_of(amax * (outer * float(1.0 / E2M1_MAX))), limit = bits_of(E4M3_MAX), smallest = 121 << 23;
    inner = inner < limit ? inner : limit;
    int32_t power = inner & INFINITE;
    power = power > smallest ? power : smallest;
    float large = float_of(power + (20 << 23));
    return ((float_of(inner) + large) - large) / outer;
}

// Write each lane's scale_inv and scale; whether one is NaN, as its block has inf or NaN.
INLINE bool make_scales(float *scale_inv, float *scale, const Panel<float> &v, int64_t block_lanes, float outer) {
    alignas(64) int32_t largest[BLOCK] = {};
    for (int i = 0; i < BLOCK; i++)
        for (int j = 0; j < BLOCK; j++) {
            int32_t magnitude = bits_of(v.at[i][j]) & MAGNITUDE;
            largest[j] = magnitude > largest[j] ? magnitude : largest[j];
        }
    int32_t of_all = *std::max_element(largest, largest + BLOCK);
    if (block_lanes == BLOCK) std::fill_n(largest, BLOCK, of_all);
    for (int j = 0; j < BLOCK; j++) scale_inv[j] = scale_inv_of(float_of(largest[j]), outer);
    for (int j = 0; j < BLOCK; j++) {
        int32_t inverse = bits_of(1.0f / scale_inv[j]);
        scale[j] = float_of(inverse < INFINITE ? inverse : INFINITE - 1);
    }
    for (int j = 0; j < BLOCK && of_all >= INFINITE; j++)
        if (largest[j] >= INFINITE) scale_inv[j] = NAN;
    return of_all >= INFINITE;
}

// Round to nearest, ties to even, as cast.cpp does; E2M1 has one bit of mantissa and the bias 1.
INLINE void encode(Panel<int32_t> &codes, const Panel<float> &v, const float *scale) {
    constexpr int32_t dropped = 22, smallest = 127 << 23, offset = (dropped << 23) - (smallest >> dropped);
    const int32_t limit = bits_of(E2M1_MAX);
    for (int i = 0; i < BLOCK; i++)
        for (int j = 0; j < BLOCK; j++) {
            int32_t bits = bits_of(v.at[i][j] * scale[j]), magnitude = bits & MAGNITUDE;
            magnitude = magnitude < limit ? magnitude : limit;
            int32_t power = magnitude & INFINITE;
            power = power > smallest ? power : smallest;
            int32_t sum = bits_of(float_of(magnitude) + float_of(power + (power >> dropped) + offset));
            codes.at[i][j] = (sum & 7) | (bits >> 28 & 8);
        }
}

// Round up where the part of a step that is dropped, in 256ths, and the random bits make a whole step.
INLINE void encode_stochastic(Panel<int32_t> &codes, const Panel<float> &v, const float *scale, const uint32_t (*words)[BLOCK]) {
    const int32_t limit = bits_of(E2M1_MAX), two = bits_of(2.0f), four = bits_of(4.0f);
    for (int i = 0; i < BLOCK; i++)
        for (int j = 0; j < BLOCK; j++) {
            int32_t bits = bits_of(v.at[i][j] * scale[j]), magnitude = bits & MAGNITUDE;
            magnitude = magnitude < limit ? magnitude : limit;
            int32_t exponent = (magnitude >= two) + (magnitude >= four);
            int32_t steps = int32_t(float_of(magnitude) * 512.0f) >> exponent;  // of half of 2^exponent, in 256ths
            int32_t code = ((steps + int32_t(words[i / 4][j] >> 8 * (i & 3) & 255)) >> 8) + 2 * exponent;
            codes.at[i][j] = code | (bits >> 28 & 8);
        }
}

// Write each lane's 16 codes, the first in the lowest bits, to 8 bytes.
INLINE void pack(uint8_t *out, int64_t stride, const Panel<int32_t> &codes, int lanes) {
    alignas(64) uint32_t words[2][BLOCK] = {};
    for (int i = 0; i < BLOCK; i++)
        for (int j = 0; j < BLOCK; j++) words[i / 8][j] |= uint32_t(codes.at[i][j]) << 4 * (i & 7);
    for (int j = 0; j < lanes; j++) {
        std::memcpy(out + j * stride, &words[0][j], 4);
        std::memcpy(out + j * stride + 4, &words[1][j], 4);
    }
}

// Cast the 16 x 16 numbers, or fewer, from a row and a column on.
template <class X> void cast_panel(const Packed &s, const Matrix<X> &m, int64_t row, int64_t col, int64_t last, float outer) {
    const int height = int(std::min<int64_t>(BLOCK, last - row)), width = int(std::min<int64_t>(BLOCK, s.cols - col));
    const int lanes = s.lanes_are_columns ? width : height, terms = s.lanes_are_columns ? height : width;
    const int64_t lane = s.lanes_are_columns ? col : row, block = (s.lanes_are_columns ? row : col) / BLOCK;
    Panel<float> loaded, transposed;
    load(loaded, m, row, col, height, width);
    if (!s.lanes_are_columns) transpose(transposed, loaded);
    Panel<float> &v = s.lanes_are_columns ? loaded : transposed;
    if (s.rotation >= 0) rotate(v, s.rotation);

    alignas(64) float scale_inv[BLOCK], scale[BLOCK];
    const bool faulty = make_scales(scale_inv, scale, v, s.block_lanes, outer);
    uint16_t *scales = s.scale_inv + lane / s.block_lanes * s.scale_row_stride + block * s.scale_col_stride;
    for (int j = 0; j < lanes; j += int(s.block_lanes)) scales[j / s.block_lanes * s.scale_row_stride] = to_bf16(scale_inv[j]);

    Panel<int32_t> codes;
    if (s.seed >= 0) {
        alignas(64) uint32_t words[BLOCK / 4][BLOCK];
        draw(words, v, s, lane, block);
        encode_stochastic(codes, v, scale, words);
    } else {
        encode(codes, v, scale);
    }
    const int written = s.rotation >= 0 ? BLOCK : terms;  // what is rotated has its padding's codes too
    if (faulty || lanes < BLOCK || written < BLOCK)
        for (int i = 0; i < BLOCK; i++)
            for (int j = 0; j < BLOCK; j++) {
                if (scale_inv[j] != scale_inv[j]) codes.at[i][j] = 7;
                if (i >= written || j >= lanes) codes.at[i][j] = 0;
            }
    if (s.codes) pack(s.codes + lane * s.codes_stride + block * (BLOCK / 2), s.codes_stride, codes, lanes);
    if (!s.transposed) return;
    Panel<int32_t> across;
    transpose(across, codes);
    pack(s.transposed + block * BLOCK * s.transposed_stride + lane / 2, s.transposed_stride, across, terms);
}

// Return the outer scale of numerics.py and reference/nvfp4.py.
float outer_scale(const Packed &s) {
    float scale = scale_from_amax(*s.amax, float(s.limit), true);
    if (s.delayed_scale && *s.delayed_scale != 0.0f) scale = *s.delayed_scale;
    if (s.rotation >= 0) scale *= 0.25f;
    return scale < 0x1p-117f ? 0x1p-117f : scale > 0x1p117f ? 0x1p117f : scale;
}

template <class X> void cast(const Packed &s, const Matrix<X> &m, int64_t from, int64_t to, int64_t threads) {
    const float outer = outer_scale(s);
    in_threads(threads, from, to, BAND, [&](int64_t, int64_t begin, int64_t end) {
        for (int64_t band = begin; band < end; band += BAND)
            for (int64_t left = 0; left < s.cols; left += WIDTH)
                for (int64_t row = band; row < std::min(band + BAND, end); row += BLOCK)
                    for (int64_t col = left; col < std::min(left + WIDTH, s.cols); col += BLOCK) cast_panel(s, m, row, col, end, outer);
    });
}

template <class Y> void decode_rows(const Packed &s, const Matrix<Y> &out, int64_t threads) {
    in_threads(threads, 0, s.rows, 1, [&](int64_t, int64_t from, int64_t to) {
        for (int64_t row = from; row < to; row++) {
            const uint16_t *scales = s.scale_inv + row / s.block_lanes * s.scale_row_stride;
            for (int64_t col = 0; col < s.cols; col += WIDTH) {
                alignas(64) uint8_t codes[WIDTH];
                alignas(64) float numbers[WIDTH];
                const int width = int(std::min<int64_t>(WIDTH, s.cols - col));
                const uint8_t *packed = s.codes + row * s.codes_stride + col / 2;
                for (int k = 0; k < width / 2; k++) codes[2 * k] = packed[k] & 15, codes[2 * k + 1] = packed[k] >> 4;
                for (int first = 0; first < width; first += BLOCK) {
                    float scale_inv = from_bf16(scales[(col + first) / BLOCK * s.scale_col_stride]);
                    for (int i = first; i < first + BLOCK; i++) {
                        int32_t bits = widened((codes[i] & 7) << 22, 126) | int32_t(uint32_t(codes[i] & 8) << 28);
                        numbers[i] = float_of(bits) * scale_inv;
                    }
                }
                typename Y::Bits *y = out.row(row) + col;
                for (int i = 0; i < width; i++) y[i] = Y::rounded(numbers[i]);
            }
        }
    });
}

}  // namespace

// Write the codes and scales of rows ``from`` to ``to``, which begin whole blocks; amax is that of all rows already. x:
// where row 0 of the matrix would be. kind: float32, bfloat16, float16.
extern "C" void octavo_cast_packed(const Packed *s, void *x, int64_t stride, int kind, int64_t from, int64_t to, int64_t threads) {
    on_kind(kind, x, stride, [&](auto m) { cast(*s, m, from, to, threads); });
}

// Write what ``codes`` [rows, cols] times scale_inv read to dense rows of float32 or bfloat16.
extern "C" void octavo_decode_packed(const Packed *s, void *out, int kind, int64_t threads) {
    if (kind == FLOAT32) decode_rows(*s, Matrix<Float32>{(uint32_t *)out, s->cols}, threads);
    else decode_rows(*s, Matrix<BFloat16>{(uint16_t *)out, s->cols}, threads);
}
