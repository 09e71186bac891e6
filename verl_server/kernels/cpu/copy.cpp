// Copies of weights that also detect NaN and infinity.

#include <cstdint>
#include <cstring>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX__
constexpr long kBytes = 32;
#else
constexpr long kBytes = 16;
#endif
constexpr long kAhead = 1024;  // bytes between a load and the prefetch for later loads

typedef uint64_t Words __attribute__((vector_size(kBytes)));

enum Store { kNone, kCached, kStreamed };

Words load(const char *from) {
    Words words;
    std::memcpy(&words, from, kBytes);
    return words;
}

// A streamed store bypasses the caches, so that the overwritten cache line need not be read. `to` is aligned to kBytes.
template <Store kStore>
void store(char *to, Words words) {
    if constexpr (kStore == kStreamed) {
#if defined(__AVX__)
        _mm256_stream_si256(reinterpret_cast<__m256i *>(to), reinterpret_cast<__m256i>(words));
        return;
#elif defined(__SSE2__)
        _mm_stream_si128(reinterpret_cast<__m128i *>(to), reinterpret_cast<__m128i>(words));
        return;
#endif
    }
    if constexpr (kStore != kNone) std::memcpy(to, &words, kBytes);
}

// Copies and returns up to kBytes bytes. The other bytes of the result are 0, which is finite.
template <Store kStore>
Words move_some(char *to, const char *from, long bytes) {
    Words words = {};
    std::memcpy(&words, from, bytes);
    if constexpr (kStore != kNone) std::memcpy(to, &words, bytes);
    return words;
}

// Copies one row. A sign bit in the result is set if all exponent bits of a number were set (see finite.py).
template <Store kStore>
Words move_row(char *to, const char *from, long bytes, Words exponents, Words lowest) {
    Words seen[4] = {};
    long i = 0;
    if constexpr (kStore == kStreamed) {
        const long head = -reinterpret_cast<uintptr_t>(to) % kBytes;
        i = head < bytes ? head : bytes;
        if (i) seen[0] |= (move_some<kStore>(to, from, i) & exponents) + lowest;
    }
    for (; i + 4 * kBytes <= bytes; i += 4 * kBytes) {
        for (long ahead = 0; ahead < 4 * kBytes; ahead += 64) __builtin_prefetch(from + i + kAhead + ahead);
        for (int j = 0; j < 4; j++) {
            const Words words = load(from + i + j * kBytes);
            store<kStore>(to + i + j * kBytes, words);
            seen[j] |= (words & exponents) + lowest;
        }
    }
    for (; i < bytes; i += kBytes) {
        const long some = bytes - i < kBytes ? bytes - i : kBytes;
        seen[0] |= (move_some<kStore>(to + i, from + i, some) & exponents) + lowest;
    }
    return seen[0] | seen[1] | seen[2] | seen[3];
}

template <Store kStore>
Words move_rows(char *to, const char *from, long rows, long bytes, long to_stride, long from_stride, Words exponents,
                Words lowest) {
    Words seen = {};
    for (long row = 0; row < rows; row++)
        seen |= move_row<kStore>(to + row * to_stride, from + row * from_stride, bytes, exponents, lowest);
    return seen;
}

}  // namespace

// Copies `rows` rows of `bytes` bytes, which start `to_stride` and `from_stride` bytes apart. Returns true if a number
// in them is NaN or infinity. `exponents` is the exponent mask of the numbers' type, repeated over 8 bytes, or 0 not to
// check. If `to` is null, nothing is copied. `streamed`: the copy is so large that it should bypass the caches.
extern "C" bool copy_rows(char *to, const char *from, long rows, long bytes, long to_stride, long from_stride,
                          uint64_t exponents, bool streamed) {
    const uint64_t lowest = exponents & ~(exponents << 1);
    const Words every = Words{} + exponents, low = Words{} + lowest;
    Words seen;
    if (!to) {
        seen = move_rows<kNone>(to, from, rows, bytes, to_stride, from_stride, every, low);
    } else if (!streamed) {
        seen = move_rows<kCached>(to, from, rows, bytes, to_stride, from_stride, every, low);
    } else {
        seen = move_rows<kStreamed>(to, from, rows, bytes, to_stride, from_stride, every, low);
#ifdef __SSE2__
        _mm_sfence();  // streamed stores must be visible before another thread reads them
#endif
    }
    uint64_t any = 0;
    for (long i = 0; i < kBytes / 8; i++) any |= seen[i];
    return any & (exponents + lowest);
}
