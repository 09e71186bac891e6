// Draws one token from each row of logits, and computes its log-probability, as kernels/draw.py defines. It works row
// by row, so that a row is read from memory once and no temporary tensor of that size is needed.

#include <omp.h>

#include <cmath>

#include "lanes.h"

namespace {

constexpr long kBlock = 64;  // draw.BLOCK

uint64_t mix(uint64_t word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

double gumbel(uint64_t key, int64_t counter) {
    const uint64_t bits = mix(key + static_cast<uint64_t>(counter) * 0x9E3779B97F4A7C15u) >> 12;
    return -std::log(-std::log((bits + 0.5) * 0x1p-52));
}

// Calls `take(lanes, real)` for the scaled logits from `first` to `end`. Only the first `real` lanes are logits.
template <typename Take>
void each(const float *logits, float scale, long first, long end, Take take) {
    for (; first < end; first += kLanes) {
        Lanes scaled = load(logits + first, end - first) * scale;
        // Forces rounding here, as in the definition: the compiler could fuse the product with a subtraction, and then
        // the largest logit minus the top would not be 0.
        asm("" : "+m"(scaled));
        take(scaled, std::min(kLanes, end - first));
    }
}

struct Row {
    const float *logits;
    float scale;
    long vocab;
    float *tops, *sums;  // for each block: the largest logit; the sum of e^(logit - largest logit of the row)

    long blocks() const { return (vocab + kBlock - 1) / kBlock; }
    long end(long block) const { return std::min(vocab, (block + 1) * kBlock); }

    // Returns the largest logit. NaN is ignored here, and makes the result of `find_sums` NaN.
    float find_tops() {
        float top = -INFINITY;
        for (long block = 0; block < blocks(); block++) {
            Lanes most = Lanes{} - INFINITY;
            each(logits, scale, block * kBlock, end(block), [&](Lanes lanes, long real) {
                for (long i = real; i < kLanes; i++) lanes[i] = -INFINITY;
                most = lanes > most ? lanes : most;
            });
            tops[block] = largest(most);
            top = std::max(top, tops[block]);
        }
        return top;
    }

    double find_sums(float top) {
        double total = 0;
        for (long block = 0; block < blocks(); block++) {
            Lanes parts = {};
            each(logits, scale, block * kBlock, end(block), [&](Lanes lanes, long real) {
                Lanes part = exponential(lanes - top);
                for (long i = real; i < kLanes; i++) part[i] = 0;
                parts += part;
            });
            total += sums[block] = sum(parts);
        }
        return total;
    }

    long best_block(bool greedy, uint64_t key) const {
        long best = 0;
        double highest = -INFINITY;
        for (long block = 0; block < blocks(); block++) {
            const double score = greedy ? tops[block] : gumbel(key, -1 - block) + std::log(sums[block]);
            if (score > highest) highest = score, best = block;
        }
        return best;
    }

    long best_token(long block, bool greedy, uint64_t key) const {
        long best = block * kBlock;
        double highest = -INFINITY;
        for (long token = best; token < end(block); token++) {
            const double score = (greedy ? 0 : gumbel(key, token + 1)) + logits[token] * scale;
            if (score > highest) highest = score, best = token;
        }
        return best;
    }
};

}  // namespace

// Writes `ids` [rows] and `logprobs` [rows] for logits [rows, vocab], whose rows start `stride` floats apart. `scales`,
// `greedy` and `keys` are [rows], `scratch` is [threads][2][blocks].
extern "C" void choose(const float *logits, const float *scales, const bool *greedy, const int64_t *keys, int64_t *ids,
                       float *logprobs, float *scratch, long rows, long vocab, long stride, long threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (rows > 1)
    for (long i = 0; i < rows; i++) {
        Row row{logits + i * stride, scales[i], vocab, nullptr, nullptr};
        row.tops = scratch + omp_get_thread_num() * 2 * row.blocks();
        row.sums = row.tops + row.blocks();
        const float top = row.find_tops();
        const double norm = std::log(row.find_sums(top));  // without `top`
        ids[i] = row.best_token(row.best_block(greedy[i], keys[i]), greedy[i], keys[i]);
        const float logit = row.logits[ids[i]] * row.scale;
        const double logprob = static_cast<double>(logit) - top - norm;
        logprobs[i] = std::isfinite(norm) ? std::max(logprob, -3.4028234663852886e38) : NAN;
    }
}
