// Products of few rows with a weight matrix, as in decode steps. Each weight is read from memory once.
//
// The rows of x are the lanes of vectors: x is first transposed into columns, and each weight is then multiplied with a
// strip of kLanes rows at once. So no sum crosses lanes, and weights are read in memory order. Up to kLanes rows, the
// product is bound by reading the weights (1 row takes as long as kLanes rows), beyond that by arithmetic.

#include <omp.h>

#include "lanes.h"

namespace {

constexpr long kStrips = 2;       // strips multiplied at once
constexpr long kSummed = 256;     // products summed before the sum is added to the total, to limit rounding errors
constexpr long kWorthThreads = 1 << 16;

// Rows of weights that are multiplied with S strips at once. That makes 8 or 16 sums, or 12 with 16 registers, which
// also hold S columns of x and a weight. With fewer than eight sums, an addition would wait for the one before.
template <int S>
constexpr long kOutputs = S == 2 && kRegisters == 16 ? 6 : 8;

// Writes the first `count` of N outputs to `rows` rows of y. `sums` is [N] vectors with one row in each lane.
template <int N>
void write(const Lanes *sums, float *y, long stride, long rows, long count) {
    constexpr int taken = N >= 8 ? 8 : N >= 4 ? 4 : N >= 2 ? 2 : 1;  // a power of two, as `transpose` needs
    Lanes block[taken];
    for (int n = 0; n < taken; n++) block[n] = sums[n];
    transpose(block);
    const float *from = reinterpret_cast<const float *>(block);
    if (count >= taken)
        for (long row = 0; row < rows; row++) std::memcpy(y + row * stride, from + row * taken, taken * sizeof(float));
    else
        for (long row = 0; row < rows; row++) std::memcpy(y + row * stride, from + row * taken, count * sizeof(float));
    if constexpr (N > taken)
        if (count > taken) write<N - taken>(sums + taken, y + taken, stride, rows, count - taken);
}

// y[0..rows][0..count] = x @ weight[0..count].T for S * kLanes rows of x, laid out as [k][S][kLanes]. If `count` < N,
// the last row of weights is multiplied repeatedly, so that all outputs are summed in the same order.
template <int S, int N>
void multiply(const float *__restrict x, const float *__restrict weight, long size, const float *bias,
              float *__restrict y, long stride, long rows, long count) {
    constexpr long line = 16;  // floats of a cache line
    const float *weights[N];
    for (long n = 0; n < N; n++) weights[n] = weight + std::min(n, count - 1) * size;
    Lanes total[S][N] = {};
    for (long first = 0; first < size; first += kSummed) {
        const long end = std::min(size, first + kSummed);
        Lanes part[S][N] = {};
        auto add = [&](long k) __attribute__((always_inline)) {
            Lanes column[S];
            for (int s = 0; s < S; s++) column[s] = *reinterpret_cast<const Lanes *>(x + (k * S + s) * kLanes);
            for (int n = 0; n < N; n++) {
                const float w = weights[n][k];
                for (int s = 0; s < S; s++) part[s][n] += w * column[s];
            }
        };
        long k = first;
        for (; k + line <= end; k += line) {
            // Rows at a distance of a multiple of 4096 bytes share one set of the first-level cache. In a set with
            // eight ways, the prefetched rows would evict the current ones, so only AVX-512 processors prefetch.
            if (kLanes == 16)
                for (int n = 0; n < N; n++) __builtin_prefetch(weights[n] + N * size + k);
#pragma GCC unroll 16
            for (long i = 0; i < line; i++) add(k + i);
        }
        for (; k < end; k++) add(k);
        for (int s = 0; s < S; s++)
            for (int n = 0; n < N; n++) total[s][n] += part[s][n];
    }
    for (int s = 0; s < S; s++, y += kLanes * stride, rows -= kLanes) {
        if (bias)
            for (int n = 0; n < N; n++) total[s][n] += bias[std::min<long>(n, count - 1)];
        write<N>(total[s], y, stride, std::min(rows, kLanes), count);
    }
}

// Computes outputs first..end for up to S * kLanes rows.
template <int S>
void multiply_panel(const float *x, const float *weight, long size, const float *bias, float *y, long stride,
                    long rows, long first, long end) {
    for (long n = first; n < end; n += kOutputs<S>)
        multiply<S, kOutputs<S>>(x, weight + n * size, size, bias ? bias + n : nullptr, y + n, stride, rows,
                                 std::min(end - n, kOutputs<S>));
}

// Transposes x [rows, size] into columns [rows / 2 / kLanes][size][2][kLanes]. A last part of at most kLanes rows
// becomes [size][1][kLanes]. Missing rows are zeros.
void lay_out(const float *x, long rows, long size, float *columns) {
#pragma omp for schedule(static)
    for (long k = 0; k < size; k += kLanes)
        for (long row = 0; row < rows; row += kLanes) {
            Lanes block[kLanes] = {};
            for (long i = 0; i < std::min(kLanes, rows - row); i++) block[i] = load(x + (row + i) * size + k, size - k);
            transpose(block);
            const long part = row / (kStrips * kLanes) * (kStrips * kLanes), strips = rows - part > kLanes ? 2 : 1;
            float *to = columns + part * size + k * strips * kLanes + (row - part);
            for (long i = 0; i < std::min(kLanes, size - k); i++) store(to + i * strips * kLanes, block[i]);
        }
}

}  // namespace

// y [rows, outputs] = x [rows, size] @ weight [outputs, size].T + bias [outputs]. All arrays are contiguous. `bias` may
// be null. `columns` is scratch memory for x, with the rows rounded up to full strips, aligned to a vector.
extern "C" void linear(const float *x, const float *weight, const float *bias, float *y, float *columns, long rows,
                       long outputs, long size, long threads) {
#pragma omp parallel num_threads(threads) if (rows * outputs * size >= kWorthThreads)
    {
        lay_out(x, rows, size, columns);
        const long me = omp_get_thread_num(), all = omp_get_num_threads();
        const long grain = rows > kLanes ? kOutputs<2> : kOutputs<1>, blocks = (outputs + grain - 1) / grain;
        const long first = blocks * me / all * grain, end = std::min(outputs, blocks * (me + 1) / all * grain);
        // A panel of weights stays in the core's cache while all rows are multiplied with it.
        const long panel = std::max(grain, 65536 / size / grain * grain);
        for (long n = first; n < end; n += panel)
            for (long row = 0; row < rows; row += kStrips * kLanes) {
                const long left = rows - row, until = std::min(end, n + panel);
                const float *part = columns + row * size;
                float *to = y + row * outputs;
                if (left > kLanes)
                    multiply_panel<2>(part, weight, size, bias, to, outputs, left, n, until);
                else
                    multiply_panel<1>(part, weight, size, bias, to, outputs, left, n, until);
            }
    }
}
