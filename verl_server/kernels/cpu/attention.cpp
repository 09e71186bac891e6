// Attention of a step: normalizes and rotates queries and keys, and stores keys and values in the pool. For decoded
// tokens it also computes attention over their pages in place. (The caller computes attention of prompt tokens.)
//
// A layer of the pool is [pages][2 (k, v)][kv_heads][page_size][head_dim]. One thread computes one KV head of a token.
// No other thread writes the key and value that it stores, or reads them in this step.

#include <omp.h>

#include <cmath>

#include "lanes.h"

extern "C" struct Attention {
    float *qkv;               // [tokens][heads + 2 * kv_heads][head_dim], overwritten by normalized and rotated heads
    const float *q_weight;    // [head_dim], or null if heads are not normalized
    const float *k_weight;
    float *pool;              // one layer
    float *out;               // [decodes][heads][head_dim]
    float *scores;            // scratch [threads][heads / kv_heads][stride]
    const float *cosines;     // [positions][head_dim]
    const float *sines;       // [positions][head_dim], the first half of each row negated
    const int64_t *positions; // [tokens]
    const int64_t *slots;     // [tokens] page * page_size + offset
    const int64_t *rows;      // [decodes] rows of the table
    const int64_t *table;     // [rows][columns] pages
    int64_t columns, tokens, decodes;  // the first `decodes` tokens are decoded
    int64_t heads, kv_heads, head_dim, page_size, threads;
    int64_t stride;           // largest number of keys of a decoded token, rounded up to a multiple of 16, plus 16
    float eps;
};

namespace {

void norm_and_rotate(const Attention &a, float *head, const float *weight, long position) {
    const long size = a.head_dim, half = size / 2;
    const float *cosines = a.cosines + position * size, *sines = a.sines + position * size;
    float normed[512];
    if (weight) {
        Lanes squares = {};
        for (long i = 0; i < size; i += kLanes) squares += load(head + i) * load(head + i);
        const float scale = 1 / std::sqrt(sum(squares) / size + a.eps);
        for (long i = 0; i < size; i++) normed[i] = head[i] * scale * weight[i];
    } else {
        std::memcpy(normed, head, size * sizeof(float));
    }
    for (long i = 0; i < half; i++) {
        head[i] = normed[i] * cosines[i] + normed[half + i] * sines[i];
        head[half + i] = normed[half + i] * cosines[half + i] + normed[i] * sines[half + i];
    }
}

// Computes scores [G][stride], the products of G queries with the keys of one page.
template <int V, int G>
void score(const float *queries, const float *keys, long count, float *scores, long stride) {
    constexpr long at_once = 4;  // keys: one load of a query serves four of them, and their sums do not wait
    Lanes query[G][V];
    for (int g = 0; g < G; g++)
        for (int v = 0; v < V; v++) query[g][v] = load(queries + (g * V + v) * kLanes);
    for (long first = 0; first < count; first += kLanes) {
        Lanes parts[G][kLanes] = {};
        for (long i = 0; i < std::min(kLanes, count - first); i += at_once) {
            const float *key = keys + (first + i) * V * kLanes;
            // Beyond the last key, the last key is read again.
            const long last = std::min(at_once, count - first - i) - 1;
            Lanes part[G][at_once] = {};
#pragma GCC unroll 8
            for (int v = 0; v < V; v++)
                for (long j = 0; j < at_once; j++) {
                    const Lanes lanes = load(key + (std::min(j, last) * V + v) * kLanes);
                    for (int g = 0; g < G; g++) part[g][j] += query[g][v] * lanes;
                }
            for (int g = 0; g < G; g++)
                for (long j = 0; j < at_once; j++) parts[g][i + j] = part[g][j];
        }
        // Writes up to kLanes - 1 scores beyond `count`: the next page overwrites them, or they are in the padding.
        for (int g = 0; g < G; g++) store(scores + g * stride + first, sums(parts[g]));
    }
}

// Adds the values of one page, weighted by probabilities [G][stride], to G rows of `out`.
template <int V, int G>
void weigh(const float *probabilities, long stride, const float *values, long count, float *out) {
    constexpr int at_once = std::min<long>(V, kRegisters / 4);  // of V vectors, whose G sums each stay in registers
    for (int first = 0; first < V; first += at_once) {
        Lanes total[G][at_once];
        for (int g = 0; g < G; g++)
            for (int v = 0; v < at_once; v++) total[g][v] = load(out + (g * V + first + v) * kLanes);
        for (long i = 0; i < count; i++)
            for (int v = 0; v < at_once; v++) {
                const Lanes value = load(values + (i * V + first + v) * kLanes);
                for (int g = 0; g < G; g++) total[g][v] += probabilities[g * stride + i] * value;
            }
        for (int g = 0; g < G; g++)
            for (int v = 0; v < at_once; v++) store(out + (g * V + first + v) * kLanes, total[g][v]);
    }
}

// Replaces scores [0..count] by e^(scale * (score - highest)) and returns the sum. May write kLanes - 1 floats more.
float exponentiate(float *scores, long count, float scale) {
    for (long i = count; i % kLanes; i++) scores[i] = -INFINITY;
    Lanes highest = Lanes{} - INFINITY;
    for (long i = 0; i < count; i += kLanes) {
        const Lanes lanes = load(scores + i);
        highest = lanes > highest ? lanes : highest;
    }
    const float most = largest(highest);
    Lanes total = {};
    for (long i = 0; i < count; i += kLanes) {
        const Lanes lanes = exponential((load(scores + i) - most) * scale);
        store(scores + i, lanes);
        total += lanes;
    }
    return sum(total);
}

// Computes attention of one decoded token for all queries of one KV head.
template <int V>
void attend_head(const Attention &a, long token, long kv_head) {
    constexpr int size = V * kLanes;
    const long group = a.heads / a.kv_heads, count = a.positions[token] + 1, stride = a.stride;
    float *scores = a.scores + omp_get_thread_num() * group * stride;
    const int64_t *pages = a.table + a.rows[token] * a.columns;
    const float *queries = a.qkv + (token * (a.heads + 2 * a.kv_heads) + kv_head * group) * size;
    float *out = a.out + (token * a.heads + kv_head * group) * size;
    auto head_of_page = [&](long first, long kind) {
        return a.pool + ((pages[first / a.page_size] * 2 + kind) * a.kv_heads + kv_head) * a.page_size * size;
    };
    // A page has too few keys for the processor to detect the access pattern, so the next page is prefetched.
    auto fetch = [&](const float *page) {
        for (long i = 0; i < a.page_size * size; i += kLanes) __builtin_prefetch(page + i);
    };
    for (long first = 0; first < count; first += a.page_size) {
        const float *keys = head_of_page(first, 0);
        fetch(first + a.page_size < count ? head_of_page(first + a.page_size, 0) : head_of_page(0, 1));
        const long here = std::min<long>(a.page_size, count - first);
        long g = 0;
        for (; g + 2 <= group; g += 2) score<V, 2>(queries + g * size, keys, here, scores + g * stride + first, stride);
        if (g < group) score<V, 1>(queries + g * size, keys, here, scores + g * stride + first, stride);
    }
    float totals[group];
    for (long g = 0; g < group; g++) totals[g] = exponentiate(scores + g * stride, count, 1 / std::sqrt((float)size));
    std::memset(out, 0, group * size * sizeof(float));
    for (long first = 0; first < count; first += a.page_size) {
        const float *values = head_of_page(first, 1);
        if (first + a.page_size < count) fetch(head_of_page(first + a.page_size, 1));
        const long here = std::min<long>(a.page_size, count - first);
        long g = 0;
        for (; g + 2 <= group; g += 2) weigh<V, 2>(scores + g * stride + first, stride, values, here, out + g * size);
        if (g < group) weigh<V, 1>(scores + g * stride + first, stride, values, here, out + g * size);
    }
    for (long g = 0; g < group; g++)
        for (long i = 0; i < size; i++) out[g * size + i] /= totals[g];
}

template <int V>
void run(const Attention &a) {
    const long group = a.heads / a.kv_heads, tasks = a.tokens * a.kv_heads, size = V * kLanes;
    const long at_once = std::max<long>(1, tasks / (16 * a.threads));
#pragma omp parallel for num_threads(a.threads) schedule(dynamic, at_once)
    for (long task = 0; task < tasks; task++) {
        const long token = task / a.kv_heads, kv_head = task % a.kv_heads, position = a.positions[token];
        float *states = a.qkv + token * (a.heads + 2 * a.kv_heads) * size;
        float *key = states + (a.heads + kv_head) * size, *value = key + a.kv_heads * size;
        for (long g = 0; g < group; g++)
            norm_and_rotate(a, states + (kv_head * group + g) * size, a.q_weight, position);
        norm_and_rotate(a, key, a.k_weight, position);
        const long page = a.slots[token] / a.page_size, offset = a.slots[token] % a.page_size;
        float *to = a.pool + ((page * 2 * a.kv_heads + kv_head) * a.page_size + offset) * size;
        std::memcpy(to, key, size * sizeof(float));
        std::memcpy(to + a.kv_heads * a.page_size * size, value, size * sizeof(float));
        if (token < a.decodes) attend_head<V>(a, token, kv_head);
    }
}

}  // namespace

// Returns false for a head_dim that is not compiled.
extern "C" bool attend(const Attention *a) {
    switch (a->head_dim) {
        case 16: run<16 / kLanes>(*a); return true;
        case 32: run<32 / kLanes>(*a); return true;
        case 64: run<64 / kLanes>(*a); return true;
        case 96: run<96 / kLanes>(*a); return true;
        case 128: run<128 / kLanes>(*a); return true;
        case 256: run<256 / kLanes>(*a); return true;
        default: return false;
    }
}
