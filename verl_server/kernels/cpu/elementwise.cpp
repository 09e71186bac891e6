// RMS norm with residual sum, and activation, each in one pass over memory.

#include <omp.h>

#include <cmath>

#include "lanes.h"

constexpr long kWorthThreads = 1 << 14;

// y = x / rms(x) * weight, for rows of `size` floats. If `residual` is not null, x is first added to it in place, and y
// is computed from the sum.
extern "C" void rms_norm(const float *x, float *residual, const float *weight, float eps, float *y, long rows,
                         long size, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size >= kWorthThreads)
    for (long row = 0; row < rows; row++) {
        const float *from = x + row * size;
        Lanes squares = {};
        if (residual) {
            float *to = residual + row * size;
            for (long i = 0; i < size; i += kLanes) {
                const Lanes total = load(to + i, size - i) + load(from + i, size - i);
                store(to + i, total, size - i);
                squares += total * total;
            }
            from = to;
        } else {
            for (long i = 0; i < size; i += kLanes) {
                const Lanes part = load(from + i, size - i);
                squares += part * part;
            }
        }
        const float scale = 1 / std::sqrt(sum(squares) / size + eps);
        for (long i = 0; i < size; i += kLanes)
            store(y + row * size + i, load(from + i, size - i) * scale * load(weight + i, size - i), size - i);
    }
}

// y [rows, size] = silu(gate) * up, where gate_up is [rows, 2 * size].
extern "C" void silu_mul(const float *gate_up, float *y, long rows, long size, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size >= kWorthThreads)
    for (long row = 0; row < rows; row++) {
        const float *gates = gate_up + row * 2 * size;
        for (long i = 0; i < size; i += kLanes) {
            const Lanes gate = load(gates + i, size - i), up = load(gates + size + i, size - i);
            store(y + row * size + i, gate / (exponential(-gate) + 1.0f) * up, size - i);
        }
    }
}
