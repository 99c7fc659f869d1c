// Casts to float8, and back, with the bits of reference/cast.py and reference/codes.py.
#include "float_bits.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

extern "C" {

// kernels/arguments.py's CastTarget of a matrix. Python packs it: library.py reads this declaration, whose lines are a
// type and names.
struct Target {
    uint8_t *codes, *transposed;   // [R, C] and transposed [C, R]; null where they are not written
    void *scale_inv;               // one number a tile, float32 or E8M0
    float *amax;
    const float *delayed_scale;    // the scale, or 0 where amax makes it; null: amax does
    int64_t rows, cols, codes_stride, transposed_stride;
    int64_t scale_row_stride, scale_col_stride, amax_row_stride, amax_col_stride, tile_rows, tile_cols;  // of tiles -1: all
    int64_t is_e8m0, is_e5m2, power_of_two;
    double limit;                  // the format's largest number, over 2^margin
    bool spans() const { return tile_rows < 0; }
    int64_t height() const { return spans() ? rows : tile_rows; }
    int64_t width() const { return tile_cols < 0 ? cols : tile_cols; }
    int64_t tiles() const { return tile_cols < 0 ? 1 : (cols + tile_cols - 1) / tile_cols; }
    float read_scale_inv(int64_t at) const {
        if (!is_e8m0) return ((const float *)scale_inv)[at];
        int32_t code = ((const uint8_t *)scale_inv)[at];
        return float_of(code << 23 | int32_t(code == 0 || code == 255) << 22);  // 2^-127, and NaN
    }
};

}  // extern "C"
SIZE_OF(Target)

namespace {

// Codes wait to be transposed: HEIGHT rows, a cache line, of PIECES pieces of WIDTH, whose whole rows a CPU reads ahead.
constexpr int64_t HEIGHT = 64, WIDTH = 128, PIECES = 32;
struct alignas(64) Piece { uint8_t codes[HEIGHT * WIDTH]; };

struct E4M3 {  // beyond: the factor by which a number must exceed the largest code's to be more than rounded to it
    static constexpr int32_t mantissa_bits = 3, bias = 7, infinite = 0x7F;
    static constexpr float max = 448.0f, beyond = 464.0f / 448.0f;
};
struct E5M2 {
    static constexpr int32_t mantissa_bits = 2, bias = 15, infinite = 0x7C;
    static constexpr float max = 57344.0f, beyond = 61440.0f / 57344.0f;
};
constexpr int32_t NAN_CODE = 0x7F;

// Raise ``amax`` [tiles] to those of a row of tiles, of which these are rows; whether one has inf or NaN. column_max:
// memory for the columns' largest magnitudes, as bits.
template <class X>
bool raise_amax(
    const Target &t, const Matrix<X> &m, int64_t from, int64_t to, float *amax, std::vector<typename X::Bits> &column_max) {
    using Bits = typename X::Bits;
    column_max.assign(to - from == 1 ? 0 : t.cols, 0);
    for (int64_t row = from; row < to && !column_max.empty(); row++) {
        Bits *columns = column_max.data(), *x = m.row(row);
        for (int64_t j = 0; j < t.cols; j++) {
            Bits magnitude = x[j] & X::magnitude;
            columns[j] = magnitude > columns[j] ? magnitude : columns[j];
        }
    }
    const Bits *columns = column_max.empty() ? m.row(from) : column_max.data();
    bool faulty = false;
    for (int64_t tile = 0; tile < t.tiles(); tile++) {
        int64_t begin = tile * t.width(), end = std::min(begin + t.width(), t.cols);
        Bits largest = 0;
        for (int64_t j = begin; j < end; j++) {
            Bits magnitude = columns[j] & X::magnitude;
            largest = magnitude > largest ? magnitude : largest;
        }
        if (largest >= X::infinite) {
            faulty = true, largest = 0;
            for (int64_t row = from; row < to; row++)
                for (int64_t j = begin; j < end; j++) {
                    Bits magnitude = m.row(row)[j] & X::magnitude;
                    largest = magnitude > largest && magnitude < X::infinite ? magnitude : largest;
                }
        }
        amax[tile] = std::max(amax[tile], X::value(largest));
    }
    return faulty;
}

// Write the amaxes ``numbers`` [tiles] of a row of tiles and their scale_inv; replace them by their scales.
void write_scales(const Target &t, int64_t i, float *numbers) {
    for (int64_t j = 0; j < t.tiles(); j++) t.amax[i * t.amax_row_stride + j * t.amax_col_stride] = numbers[j];
    for (int64_t j = 0; j < t.tiles(); j++) numbers[j] = scale_from_amax(numbers[j], float(t.limit), t.power_of_two);
    if (t.delayed_scale && *t.delayed_scale != 0.0f) std::fill_n(numbers, t.tiles(), *t.delayed_scale);
    const int64_t first = i * t.scale_row_stride, step = t.scale_col_stride, tiles = t.tiles();
    if (t.is_e8m0)
        for (int64_t j = 0; j < tiles; j++) ((uint8_t *)t.scale_inv)[first + j * step] = uint8_t(bits_of(1.0f / numbers[j]) >> 23);
    else
        for (int64_t j = 0; j < tiles; j++) ((float *)t.scale_inv)[first + j * step] = 1.0f / numbers[j];
}

// Round to nearest, ties to even: added to 2^20 times its power of two, a number leaves E4M3's digits in the sum's last
// bits. What is added has the code's exponent there too, so that these bits are the code.
template <class X, class F>
INLINE void encode(uint8_t *__restrict codes, const typename X::Bits *__restrict x, const float *__restrict scale, int64_t width) {
    constexpr int32_t dropped = 23 - F::mantissa_bits, smallest = (128 - F::bias) << 23;
    constexpr int32_t offset = (dropped << 23) - (smallest >> dropped);
    const int32_t limit = bits_of(F::max);
    for (int64_t j = 0; j < width; j++) {
        int32_t magnitude = bits_of(X::value(x[j] & X::magnitude) * scale[j]);
        magnitude = magnitude < limit ? magnitude : limit;
        int32_t power = magnitude & INFINITE;
        power = power > smallest ? power : smallest;
        int32_t sum = bits_of(float_of(magnitude) + float_of(power + (power >> dropped) + offset));
        codes[j] = uint8_t(sum & 0x7F);
    }
    for (int64_t j = 0; j < width; j++) codes[j] |= uint8_t(x[j] >> (8 * sizeof(x[j]) - 8) & 0x80);
}

template <class X, class F> void encode_faults(uint8_t *codes, const typename X::Bits *x, int64_t width) {
    for (int64_t j = 0; j < width; j++) {
        typename X::Bits magnitude = x[j] & X::magnitude;
        if (magnitude == X::infinite) codes[j] = F::infinite == NAN_CODE ? NAN_CODE : (codes[j] & 0x80) | F::infinite;
        if (magnitude > X::infinite) codes[j] = NAN_CODE;
    }
}

typedef uint8_t Bytes __attribute__((vector_size(16)));
#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, Bytes{__VA_ARGS__})
#endif

// Transpose 16 x 16 bytes by four perfect shuffles of their rows.
INLINE void transpose16(uint8_t *out, int64_t stride, const uint8_t *in) {
    Bytes rows[16], next[16];
    for (int i = 0; i < 16; i++) std::memcpy(rows + i, in + i * WIDTH, 16);
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            Bytes a = rows[i], b = rows[i + 8];
            next[2 * i] = SHUFFLED(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            next[2 * i + 1] = SHUFFLED(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        std::memcpy(rows, next, sizeof rows);
    }
    for (int i = 0; i < 16; i++) std::memcpy(out + i * stride, rows + i, 16);
}

void transpose(uint8_t *out, int64_t stride, const uint8_t *in, int64_t height, int64_t width) {
    for (int64_t col = 0; col < width; col += 16)
        for (int64_t row = 0; row < height; row += 16) {
            if (col + 16 <= width && row + 16 <= height) {
                transpose16(out + col * stride + row, stride, in + row * WIDTH + col);
                continue;
            }
            for (int64_t j = col; j < std::min(col + 16, width); j++)
                for (int64_t i = row; i < std::min(row + 16, height); i++) out[j * stride + i] = in[i * WIDTH + j];
        }
}

// Return the scale of each column from ``col`` on, by those of a row of tiles; it may lie in ``memory`` [width].
INLINE const float *scales_of_columns(const Target &t, const float *tiles, int64_t col, int64_t width, float *memory) {
    if (t.tile_cols == 1) return tiles + col;
    for (int64_t j = 0; j < width;) {
        int64_t tile = (col + j) / t.width(), end = std::min((tile + 1) * t.width() - col, width);
        for (; j < end; j++) memory[j] = tiles[tile];
    }
    return memory;
}

// Write the codes of up to HEIGHT rows. ``scales`` [tile rows, tiles]: from the row of tiles ``first`` on.
template <class X, class F>
void write_codes(
    const Target &t, const Matrix<X> &m, int64_t from, int64_t to, const float *scales, int64_t first, bool faulty,
    std::vector<Piece> &pieces) {
    alignas(64) float column_scales[PIECES * WIDTH];
    for (int64_t block = 0; block < t.cols; block += PIECES * WIDTH) {
        int64_t end = std::min(t.cols, block + PIECES * WIDTH), tile_row = -1;
        const float *scale = nullptr;
        for (int64_t row = from; row < to; row++) {
            if (row / t.height() != tile_row) {
                tile_row = row / t.height();
                scale = scales_of_columns(t, scales + (tile_row - first) * t.tiles(), block, end - block, column_scales);
            }
            Piece *piece = pieces.data();
            for (int64_t col = block; col < end; col += WIDTH, piece++) {
                const typename X::Bits *x = m.row(row) + col;
                uint8_t *codes = piece->codes + (row - from) * WIDTH, *out = t.codes + row * t.codes_stride + col;
                int64_t width = std::min(end - col, WIDTH);
                encode<X, F>(codes, x, scale + (col - block), width);
                if (faulty) encode_faults<X, F>(codes, x, width);
                if (t.codes && width == WIDTH) std::memcpy(out, codes, WIDTH);
                else if (t.codes) std::memcpy(out, codes, width);
            }
        }
        const Piece *piece = pieces.data();
        for (int64_t col = block; t.transposed && col < end; col += WIDTH, piece++)
            transpose(
                t.transposed + col * t.transposed_stride + from, t.transposed_stride, piece->codes, to - from, std::min(end - col, WIDTH));
    }
}

template <class X> bool amax(const Target &t, const Matrix<X> &m, int64_t from, int64_t to, int64_t threads) {
    std::vector<std::vector<float>> tile_amaxes(threads, std::vector<float>(t.tiles()));
    std::vector<int> faulty(threads);
    in_threads(threads, from, to, HEIGHT, [&](int64_t share, int64_t first, int64_t last) {
        std::vector<typename X::Bits> column_max;
        faulty[share] = raise_amax<X>(t, m, first, last, tile_amaxes[share].data(), column_max);
    });
    for (int64_t j = 0; j < t.tiles(); j++) {
        float &out = t.amax[j * t.amax_col_stride];
        if (from == 0) out = 0.0f;
        for (auto &of_rows : tile_amaxes) out = std::max(out, of_rows[j]);
    }
    return *std::max_element(faulty.begin(), faulty.end());
}

template <class X>
void cast(const Target &t, const Matrix<X> &m, int64_t from, int64_t to, bool faulty, int64_t threads) {
    auto write = t.is_e5m2 ? write_codes<X, E5M2> : write_codes<X, E4M3>;
    int64_t unit = t.spans() ? HEIGHT : (HEIGHT + t.height() - 1) / t.height() * t.height(), tiles = t.tiles();
    std::vector<float> spanning_scales(t.spans() ? tiles : 0);
    for (size_t j = 0; j < spanning_scales.size(); j++) spanning_scales[j] = t.amax[j * t.amax_col_stride];
    if (t.spans()) write_scales(t, 0, spanning_scales.data());
    in_threads(threads, from, to, unit, [&](int64_t, int64_t begin, int64_t end) {
        std::vector<float> tile_scales;
        std::vector<typename X::Bits> column_max;
        std::vector<Piece> pieces(std::min((t.cols + WIDTH - 1) / WIDTH, PIECES));
        for (int64_t row = begin; row < end; row += unit) {
            int64_t stop = std::min(row + unit, end), first = t.spans() ? 0 : row / t.height();
            bool is_faulty = faulty;
            tile_scales.assign(t.spans() ? 0 : unit / t.height() * tiles, 0.0f);
            float *numbers = tile_scales.data();
            for (int64_t i = row; !t.spans() && i < stop; i += t.height(), numbers += tiles) {
                is_faulty |= raise_amax<X>(t, m, i, std::min(i + t.height(), stop), numbers, column_max);
                write_scales(t, i / t.height(), numbers);
            }
            const float *scales = t.spans() ? spanning_scales.data() : tile_scales.data();
            for (int64_t i = row; i < stop; i += HEIGHT) write(t, m, i, std::min(i + HEIGHT, stop), scales, first, is_faulty, pieces);
        }
    });
}

template <class F, class Y> INLINE void decode(typename Y::Bits *out, const uint8_t *codes, const float *scale_inv, int64_t width) {
    int64_t j = 0;
#ifdef __F16C__
    // A code is a float16 but for its exponent's bias, which 2^8 makes up for in E4M3, and E4M3's NaN. The instruction
    // reads subnormal ones on a CPU that flushes these too.
    constexpr int shift = 10 - F::mantissa_bits;
    const __m256 bias = _mm256_set1_ps(shift == 7 ? 0x1p8f : 1.0f);
    const __m128i sign = _mm_set1_epi16(0x80), nan = _mm_set1_epi16(NAN_CODE), infinite = _mm_set1_epi16(0x7C00);
    for (; j + 64 <= width; j += 64) {
        alignas(32) float numbers[64];
        for (int64_t k = 0; k < 64; k += 8) {
            __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(codes + j + k)));
            __m128i half = _mm_slli_epi16(shift == 7 ? _mm_add_epi16(x, _mm_and_si128(x, sign)) : x, shift);
            half = _mm_or_si128(half, _mm_and_si128(_mm_cmpeq_epi16(_mm_and_si128(x, nan), nan), infinite));
            __m256 number = _mm256_mul_ps(_mm256_cvtph_ps(half), bias);
            _mm256_store_ps(numbers + k, _mm256_mul_ps(number, _mm256_loadu_ps(scale_inv + j + k)));
        }
        for (int64_t k = 0; k < 64; k++) out[j + k] = Y::rounded(numbers[k]);
    }
#endif
    for (; j < width; j++) {
        int32_t magnitude = (codes[j] & 0x7F) << (23 - F::mantissa_bits), bits = widened(magnitude, 127 - F::bias);
        bits = magnitude < F::infinite << (23 - F::mantissa_bits) ? bits : magnitude | INFINITE;
        out[j] = Y::rounded(float_of(bits | int32_t(uint32_t(codes[j] & 0x80) << 24)) * scale_inv[j]);
    }
}

// Call ``work(row, scale_inv of its columns)`` for each of these rows.
template <class Work> INLINE void with_scales(const Target &t, int64_t from, int64_t to, Work work) {
    std::vector<float> memory(t.cols), tiles(t.tiles());
    const float *scales = nullptr;
    for (int64_t row = from; row < to; row++) {
        if (row == from || row % t.height() == 0) {
            int64_t first = row / t.height() * t.scale_row_stride;
            for (int64_t j = 0; j < t.tiles(); j++) tiles[j] = t.read_scale_inv(first + j * t.scale_col_stride);
            scales = scales_of_columns(t, tiles.data(), 0, t.cols, memory.data());
        }
        work(row, scales);
    }
}

template <class Y> void decode_rows(const Target &t, const Matrix<Y> &out, int64_t threads) {
    in_threads(threads, 0, t.rows, 1, [&](int64_t, int64_t from, int64_t to) {
        with_scales(t, from, to, [&](int64_t row, const float *scales) {
            (t.is_e5m2 ? decode<E5M2, Y> : decode<E4M3, Y>)(out.row(row), t.codes + row * t.codes_stride, scales, t.cols);
        });
    });
}

constexpr int64_t LANES = 8;                      // sums of squares, so that a CPU adds as many at a time
constexpr int64_t COUNTED = 8, EXPONENTS = 256;  // of ``totals``: seven sums and the amax; numbers by exponent
enum { ELEMENTS, ZEROS, FLUSHED, CLIPPED, NONFINITE, POWER, ERROR, AMAX };

// Add the counts of a row to ``counts``. Write its finite numbers, and in place of what its codes read each one's error.
template <class F, class X>
INLINE void count_row(double *counts, const typename X::Bits *x, const uint8_t *codes, float *numbers, float *errors, int64_t cols) {
    int32_t zeros = 0, empty = 0, clipped = 0, amax = 0;
    for (int64_t j = 0; j < cols; j++) {
        int32_t bits = bits_of(X::value(x[j])), magnitude = bits & MAGNITUDE, code = codes[j] & 0x7F;
        bits = magnitude < INFINITE ? bits : 0;
        float number = float_of(bits), read = errors[j], size = float_of(bits & MAGNITUDE);
        zeros += magnitude == 0;
        empty += code == 0;
        clipped += (code == F::infinite - 1) & (size > float_of(bits_of(read) & MAGNITUDE) * F::beyond);
        amax = std::max(amax, bits & MAGNITUDE);
        numbers[j] = number;
        errors[j] = magnitude < INFINITE ? number - read : 0.0f;
    }
    counts[ZEROS] += zeros, counts[FLUSHED] += empty - zeros, counts[CLIPPED] += clipped;
    counts[AMAX] = std::max(counts[AMAX], double(float_of(amax)));
}

// Add the squares of ``numbers``, whole LANES of them, to LANES sums.
INLINE void add_squares(double *sums, const std::vector<float> &numbers) {
    for (size_t j = 0; j < numbers.size(); j += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) {
            double number = numbers[j + lane];
            sums[lane] += number * number;
        }
}

template <class F, class X> void count_rows(const Target &t, const Matrix<X> &m, int64_t threads, double *totals) {
    std::vector<std::vector<double>> of_shares(threads, std::vector<double>(COUNTED + EXPONENTS));
    in_threads(threads, 0, t.rows, 1, [&](int64_t share, int64_t from, int64_t to) {
        double *counts = of_shares[share].data(), power[LANES] = {}, error[LANES] = {};
        int64_t bins[4][EXPONENTS] = {};  // four, as numbers in a row often have the same exponent
        std::vector<float> numbers((t.cols + LANES - 1) / LANES * LANES), errors(numbers.size());
        with_scales(t, from, to, [&](int64_t row, const float *scales) {
            const typename X::Bits *x = m.row(row);
            const uint8_t *codes = t.codes + row * t.codes_stride;
            decode<F, Float32>((uint32_t *)errors.data(), codes, scales, t.cols);
            count_row<F, X>(counts, x, codes, numbers.data(), errors.data(), t.cols);
            add_squares(power, numbers);
            add_squares(error, errors);
            for (int64_t j = 0; j < t.cols; j++) bins[j & 3][bits_of(X::value(x[j])) >> 23 & 0xFF]++;
        });
        for (int64_t lane = 0; lane < LANES; lane++) counts[POWER] += power[lane], counts[ERROR] += error[lane];
        for (auto &some : bins)
            for (int64_t bin = 0; bin < EXPONENTS; bin++) counts[COUNTED + bin] += double(some[bin]);
    });
    for (auto &counts : of_shares)
        for (int64_t i = 0; i < COUNTED + EXPONENTS; i++)
            totals[i] = i == AMAX ? std::max(totals[i], counts[i]) : totals[i] + counts[i];
    totals[ELEMENTS] = double(t.rows * t.cols), totals[NONFINITE] = totals[COUNTED + EXPONENTS - 1];
}

// Write a row of a gated activation of h = (gate | up) or, given its gradient dy, h's, by one rounding for each operation
// of reference/activation.py. ``value`` and ``slope``: the gate's; silu: ``value`` is its sigmoid, ``slope`` nothing.
// Without dy ``out`` may be ``value``; with it, ``y`` is where the activation goes too, or null.
template <bool silu, class X, class Y>
INLINE void multiply_gate(
    float *out, const float *value, const float *slope, const typename X::Bits *h, const typename Y::Bits *dy, float *y,
    int64_t cols) {
    if (float *activation = dy ? y : out) {
#pragma GCC ivdep
        for (int64_t j = 0; j < cols; j++) activation[j] = (silu ? value[j] * X::value(h[j]) : value[j]) * X::value(h[cols + j]);
    }
    if (!dy) return;
#pragma GCC ivdep
    for (int64_t j = 0; j < cols; j++) {
        float s = value[j], gate = X::value(h[j]), gradient = Y::value(dy[j]);
        out[j] = (silu ? gate * (1.0f - s) * s + s : slope[j]) * (X::value(h[cols + j]) * gradient);
        out[cols + j] = (silu ? s * gate : s) * gradient;
    }
}

}  // namespace

// Write the amax of tiles that span all rows, or, from another row than 0 on, raise it to that of these rows; whether one
// has inf or NaN. x: where row 0 of the matrix would be. kind: float32, bfloat16, float16.
extern "C" int octavo_amax(const Target *t, void *x, int64_t stride, int kind, int64_t from, int64_t to, int64_t threads) {
    return on_kind(kind, x, stride, [&](auto m) { return amax(*t, m, from, to, threads); });
}

// Write all else of rows that begin whole tiles; ``faulty``: what octavo_amax has told of them, or -1 to ask it here.
extern "C" void octavo_cast(
    const Target *t, void *x, int64_t stride, int kind, int64_t from, int64_t to, int64_t threads, int faulty) {
    on_kind(kind, x, stride, [&](auto m) {
        cast(*t, m, from, to, faulty < 0 ? t->spans() && amax(*t, m, from, to, threads) : faulty, threads);
    });
}

// Write what codes times scale_inv read to dense rows of float32 or bfloat16.
extern "C" void octavo_decode(const Target *t, void *out, int kind, int64_t threads) {
    if (kind == FLOAT32) decode_rows(*t, Matrix<Float32>{(uint32_t *)out, t->cols}, threads);
    else decode_rows(*t, Matrix<BFloat16>{(uint16_t *)out, t->cols}, threads);
}

// Add to ``totals`` [264] what reference/cast_statistics.py's ``measured`` finds of x and its codes.
extern "C" void octavo_count(const Target *t, void *x, int64_t stride, int kind, int64_t threads, double *totals) {
    on_kind(kind, x, stride, [&](auto m) {
        if (t->is_e5m2) count_rows<E5M2>(*t, m, threads, totals);
        else count_rows<E4M3>(*t, m, threads, totals);
    });
}

// Write reference/activation.py's ``gated`` to dense rows of float32 from h [rows, 2 cols] and dy [rows, cols], or null;
// ``value``, ``slope`` and ``y`` are dense, see multiply_gate.
extern "C" void octavo_gated(
    float *out, const float *value, const float *slope, int silu, void *h, int64_t h_stride, int h_kind,
    void *dy, int64_t dy_stride, int dy_kind, float *y, int64_t rows, int64_t cols, int64_t threads) {
    on_kind(h_kind, h, h_stride, [&](auto hs) {
        on_kind(dy_kind, dy, dy_stride, [&](auto dys) {
            using X = typename decltype(hs)::Kind;
            using Y = typename decltype(dys)::Kind;
            auto multiply = silu ? multiply_gate<true, X, Y> : multiply_gate<false, X, Y>;
            in_threads(threads, 0, rows, 1, [&](int64_t, int64_t first, int64_t last) {
                for (int64_t i = first; i < last; i++) {
                    const float *slopes = slope ? slope + i * cols : nullptr;
                    const typename Y::Bits *gradient = dy ? dys.row(i) : nullptr;
                    float *activation = y ? y + i * cols : nullptr, *row = out + i * cols * (dy ? 2 : 1);
                    multiply(row, value + i * cols, slopes, hs.row(i), gradient, activation, cols);
                }
            });
        });
    });
}
