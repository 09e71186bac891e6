// Vectors of floats as wide as one register of the processor, in the compiler's vector types.
//
// Wider vectors would be correct, but several times slower: the compiler splits each of them into several registers,
// runs out of registers, and keeps sums in memory.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr long kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr long kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr long kLanes = 4, kRegisters = 32;
#else
constexpr long kLanes = 4, kRegisters = 16;
#endif

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntLanes __attribute__((vector_size(kLanes * sizeof(int32_t))));

static inline Lanes load(const float *from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

static inline void store(float *to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

// Loads and stores only the first `count` lanes, at the end of a row. The other lanes are loaded as zero.
static inline Lanes load(const float *from, long count) {
    if (count >= kLanes) return load(from);
    Lanes lanes = {};
    std::memcpy(&lanes, from, count * sizeof(float));
    return lanes;
}

static inline void store(float *to, Lanes lanes, long count) {
    if (count >= kLanes) return store(to, lanes);
    std::memcpy(to, &lanes, count * sizeof(float));
}

static inline float sum(Lanes lanes) {
    float total = 0;
    for (long i = 0; i < kLanes; i++) total += lanes[i];
    return total;
}

// A vector of selected lanes: 0 to kLanes - 1 are those of a, higher numbers those of b.
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, IntLanes{__VA_ARGS__})
#endif

// EVEN and ODD select every second lane of a and b. ZIP_LOW and ZIP_HIGH interleave the lower or upper halves.
#if defined(__AVX512F__)
#define EVEN(a, b) PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#define ZIP_LOW(a, b) PICK(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ZIP_HIGH(a, b) PICK(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif defined(__AVX__)
#define EVEN(a, b) PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD(a, b) PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#define ZIP_LOW(a, b) PICK(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define ZIP_HIGH(a, b) PICK(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define EVEN(a, b) PICK(a, b, 0, 2, 4, 6)
#define ODD(a, b) PICK(a, b, 1, 3, 5, 7)
#define ZIP_LOW(a, b) PICK(a, b, 0, 4, 1, 5)
#define ZIP_HIGH(a, b) PICK(a, b, 2, 6, 3, 7)
#endif

static inline float largest(Lanes lanes) {
    float most = lanes[0];
    for (long i = 1; i < kLanes; i++) most = std::max(most, lanes[i]);
    return most;
}

// The sums of neighbouring lanes, first of a, then of b.
static inline Lanes add_pairs(Lanes a, Lanes b) { return EVEN(a, b) + ODD(a, b); }

// Returns the sum of each of kLanes vectors, one in each lane. Overwrites the vectors.
static inline Lanes sums(Lanes *vectors) {
    for (long left = kLanes / 2; left; left /= 2)
        for (long i = 0; i < left; i++) vectors[i] = add_pairs(vectors[2 * i], vectors[2 * i + 1]);
    return vectors[0];
}

// Transposes N vectors, a power of two: their floats [N][kLanes] become [kLanes][N], in the same N vectors.
template <int N>
static inline void transpose(Lanes (&vectors)[N]) {
    for (int stage = 1; stage < N; stage *= 2) {
        // Each stage moves the highest bit of the vector index below the bits of the lane index.
        Lanes next[N];
        for (int i = 0; i < N / 2; i++) {
            next[2 * i] = ZIP_LOW(vectors[i], vectors[i + N / 2]);
            next[2 * i + 1] = ZIP_HIGH(vectors[i], vectors[i + N / 2]);
        }
        for (int i = 0; i < N; i++) vectors[i] = next[i];
    }
}

// Returns e^x with an error of one or two ulps: 0 for x < -87, e^88 for x > 88.
static inline Lanes exponential(Lanes x) {
    const Lanes low = Lanes{} - 87.0f, high = Lanes{} + 88.0f;
    const IntLanes vanishes = x < low;
    x = x < low ? low : x;
    x = x > high ? high : x;
    // e^x = 2^n e^r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer. ln 2 is subtracted in two parts.
    const Lanes magic = Lanes{} + 12582912.0f;
    const Lanes n = (x * 1.44269504f + magic) - magic;
    const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Lanes e = Lanes{} + 1.0f / 5040;  // Taylor series, whose next term is below 6e-9
    e = e * r + 1.0f / 720;
    e = e * r + 1.0f / 120;
    e = e * r + 1.0f / 24;
    e = e * r + 1.0f / 6;
    e = e * r + 0.5f;
    e = e * r + 1.0f;
    e = e * r + 1.0f;
    IntLanes bits;
    std::memcpy(&bits, &e, sizeof bits);
    bits += __builtin_convertvector(n, IntLanes) << 23;
    std::memcpy(&e, &bits, sizeof e);
    return vanishes ? Lanes{} : e;
}
