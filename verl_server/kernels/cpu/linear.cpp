// Products of few rows with a weight matrix: what a decode step is made of. Each weight is read from memory once.
//
// Sixteen rows of x are the lanes of a vector: x is first laid out by columns, and one weight is then multiplied with
// sixteen rows at once. So no sum crosses lanes, and weights are read in order as they lie. Up to sixteen rows it is
// bound by reading the weights (1 row takes as long as 16), from then on by arithmetic.

#include <omp.h>

#include "lanes.h"

namespace {

constexpr long kOutputs = 8;      // rows of weights multiplied at once
constexpr long kSummed = 256;     // products added up in a row before they join the total, which rounds them again
constexpr long kWorthThreads = 1 << 16;

// y[0..rows][0..N] = x @ weight[0..N].T, of `strips` * 16 rows of x laid out as [k][strips][16].
template <int S, int N>
void multiply(const float *__restrict x, const float *__restrict weight, long size, const float *bias,
              float *__restrict y, long stride, long rows) {
    Lanes total[S][N] = {};
    for (long first = 0; first < size; first += kSummed) {
        const long end = std::min(size, first + kSummed);
        Lanes part[S][N] = {};
        auto add = [&](long k) __attribute__((always_inline)) {
            Lanes column[S];
            for (int s = 0; s < S; s++) column[s] = *reinterpret_cast<const Lanes *>(x + (k * S + s) * kLanes);
            for (int n = 0; n < N; n++) {
                const float w = weight[n * size + k];
                for (int s = 0; s < S; s++) part[s][n] += w * column[s];
            }
        };
        long k = first;
        for (; k + kLanes <= end; k += kLanes) {
            for (int n = 0; n < N; n++) __builtin_prefetch(weight + (n + N) * size + k);
#pragma GCC unroll 16
            for (long i = 0; i < kLanes; i++) add(k + i);
        }
        for (; k < end; k++) add(k);
        for (int s = 0; s < S; s++)
            for (int n = 0; n < N; n++) total[s][n] += part[s][n];
    }
    for (int s = 0; s < S; s++) {
        if (bias)
            for (int n = 0; n < N; n++) total[s][n] += bias[n];
        transpose(total[s]);
        const float *from = reinterpret_cast<const float *>(total[s]);
        for (long row = s * kLanes; row < std::min(rows, (s + 1) * kLanes); row++, from += N)
            std::memcpy(y + row * stride, from, N * sizeof(float));
    }
}

template <int S>
void multiply_panel(const float *x, const float *weight, long size, const float *bias, float *y, long stride,
                    long rows, long first, long end) {
    long n = first;
    for (; n + kOutputs <= end; n += kOutputs)
        multiply<S, kOutputs>(x, weight + n * size, size, bias ? bias + n : nullptr, y + n, stride, rows);
    for (; n < end; n++) multiply<S, 1>(x, weight + n * size, size, bias ? bias + n : nullptr, y + n, stride, rows);
}

// x [rows, size] by columns: [rows / 32][size][2][16], a last part of at most 16 rows as [size][1][16], padded with zeros.
void lay_out(const float *x, long rows, long size, float *columns) {
#pragma omp for schedule(static)
    for (long k = 0; k < size; k += kLanes)
        for (long row = 0; row < rows; row += kLanes) {
            Lanes block[kLanes] = {};
            for (long i = 0; i < std::min(kLanes, rows - row); i++) block[i] = load(x + (row + i) * size + k, size - k);
            transpose(block);
            const long part = row / (2 * kLanes) * (2 * kLanes), strips = rows - part > kLanes ? 2 : 1;
            float *to = columns + part * size + k * strips * kLanes + (row - part);
            for (long i = 0; i < std::min(kLanes, size - k); i++) store(to + i * strips * kLanes, block[i]);
        }
}

}  // namespace

// y [rows, outputs] = x [rows, size] @ weight [outputs, size].T + bias [outputs], or none; all contiguous. `columns` is
// scratch for x, of rows in full sixteens, aligned as vectors are.
extern "C" void linear(const float *x, const float *weight, const float *bias, float *y, float *columns, long rows,
                       long outputs, long size, long threads) {
#pragma omp parallel num_threads(threads) if (rows * outputs * size >= kWorthThreads)
    {
        lay_out(x, rows, size, columns);
        const long me = omp_get_thread_num(), all = omp_get_num_threads();
        const long blocks = (outputs + kOutputs - 1) / kOutputs;
        const long first = blocks * me / all * kOutputs, end = std::min(outputs, blocks * (me + 1) / all * kOutputs);
        // A panel of weights stays in the core's cache while all rows are multiplied with it.
        const long panel = std::max(kOutputs, 65536 / size / kOutputs * kOutputs);
        for (long n = first; n < end; n += panel)
            for (long row = 0; row < rows; row += 2 * kLanes) {
                const long left = rows - row, until = std::min(end, n + panel);
                const float *part = columns + row * size;
                float *to = y + row * outputs;
                if (left > kLanes)
                    multiply_panel<2>(part, weight, size, bias, to, outputs, std::min(left, 2 * kLanes), n, until);
                else
                    multiply_panel<1>(part, weight, size, bias, to, outputs, left, n, until);
            }
    }
}
