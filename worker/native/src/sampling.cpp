// Processors in transformers' order (temperature, top-k, top-p, min-p), then Gumbel-max over what survives.
//
// Token t of a row with (seed, index) draws the 52-bit uniform u = (x + 0.5) / 2^52 from Philox block
//
//   key     = (seed low, seed high)
//   counter = (t / 2, 0, index low, index high)
//   x       = words (0, 1) of the block for even t, words (2, 3) for odd t; the first word is the high one
//
// and scores z(t) - log(-log(1 - u)). The highest score wins; of equal scores the lowest id. Noise thus belongs to the
// token and not to its place among the survivors, nor to anything else in the batch.
#include "chairlift/sampling.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "chairlift/philox.hpp"
#include "chairlift/top_logprobs.hpp"

#define CHAIRLIFT_API extern "C" __attribute__((visibility("default")))

namespace {

using chairlift::log_share;
using chairlift::philox4x32;
using chairlift::TopTokens;
using Ids = std::vector<std::int32_t>;

constexpr double kGreedyBelow = 1e-5;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kLog2E = 1.4426950408889634;

struct Best {
  double score = -std::numeric_limits<double>::infinity();
  std::int32_t id = -1;

  void offer(double other, std::int32_t other_id) {
    if (other > score || (other == score && other_id < id)) {
      score = other;
      id = other_id;
    }
  }
};

struct Noise {
  chairlift::PhiloxKey key;
  std::uint32_t index_low;
  std::uint32_t index_high;

  explicit Noise(const ChairliftSampleParams& params)
      : key{static_cast<std::uint32_t>(params.seed), static_cast<std::uint32_t>(params.seed >> 32)},
        index_low(static_cast<std::uint32_t>(params.index)),
        index_high(static_cast<std::uint32_t>(params.index >> 32)) {}

  static double gumbel(std::uint32_t high, std::uint32_t low) {
    const std::uint64_t bits = ((std::uint64_t{high} << 32) | low) >> 12;
    const double uniform = (static_cast<double>(bits) + 0.5) * 0x1p-52;
    return -std::log(-std::log1p(-uniform));
  }

  double of(std::int32_t id) const {
    const auto block = philox4x32({static_cast<std::uint32_t>(id) / 2, 0, index_low, index_high}, key);
    return id % 2 == 0 ? gumbel(block[0], block[1]) : gumbel(block[2], block[3]);
  }
};

// Chunks of blocks, so that the compiler can turn the rounds into vector code.
constexpr int kChunkBlocks = 64;
constexpr int kChunkTokens = 2 * kChunkBlocks;

struct NoiseChunk {
  std::uint32_t word[4][kChunkBlocks];

  void fill(const Noise& noise, std::uint32_t first_block) {
    for (int i = 0; i < kChunkBlocks; ++i) {
      const auto block =
          philox4x32({first_block + static_cast<std::uint32_t>(i), 0, noise.index_low, noise.index_high}, noise.key);
      for (int w = 0; w < 4; ++w) {
        word[w][i] = block[static_cast<std::size_t>(w)];
      }
    }
  }
};

// A lower bound of log2(u) from the high word: its exponent. Low bits are cleared so that the conversion cannot round
// up into the next power of two.
inline float log2_floor(std::uint32_t high) {
  const auto leading = static_cast<std::int32_t>((high >> 1) & ~0x7Fu);
  const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(leading));
  return static_cast<float>(static_cast<std::int32_t>(bits >> 23) - 127 - 31);
}

// Gumbel-max over the whole row. -log(1-u) >= u, so token t can only win if u <= exp(z(t) - best): nearly all tokens
// fail that on the exponents alone and never see a logarithm.
Best gumbel_max_dense(const float* z, std::int64_t n, std::int32_t argmax, const Noise& noise) {
  constexpr float kMargin = 1e-2F;  // far above the rounding of the float arithmetic below
  Best best;
  best.offer(z[argmax] + noise.of(argmax), argmax);
  NoiseChunk chunk;
  bool may_win[kChunkTokens];
  for (std::int64_t first = 0; first < n; first += kChunkTokens) {
    chunk.fill(noise, static_cast<std::uint32_t>(first / 2));
    const int size = static_cast<int>(std::min<std::int64_t>(kChunkTokens, n - first));
    bool any = false;
    for (int i = 0; i < size; ++i) {
      const auto limit = static_cast<float>((z[first + i] - best.score) * kLog2E);
      may_win[i] = log2_floor(chunk.word[(i & 1) * 2][i >> 1]) < limit + kMargin;
      any |= may_win[i];
    }
    if (!any) {
      continue;
    }
    for (int i = 0; i < size; ++i) {
      if (may_win[i]) {
        const int lane = (i & 1) * 2;
        best.offer(z[first + i] + Noise::gumbel(chunk.word[lane][i >> 1], chunk.word[lane + 1][i >> 1]),
                   static_cast<std::int32_t>(first + i));
      }
    }
  }
  return best;
}

// The k-th highest of n values, 1 <= k < n.
float kth_highest(const float* z, std::int64_t n, std::int64_t k) {
  thread_local std::vector<float> heap;
  if (k > 1024) {
    heap.assign(z, z + n);
    std::nth_element(heap.begin(), heap.begin() + (k - 1), heap.end(), std::greater<>());
    return heap[static_cast<std::size_t>(k - 1)];
  }
  heap.assign(z, z + k);
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  for (std::int64_t i = k; i < n; ++i) {
    if (z[i] > heap.front()) {
      std::pop_heap(heap.begin(), heap.end(), std::greater<>());
      heap.back() = z[i];
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
    }
  }
  return heap.front();
}

// Drops the least probable tokens whose probabilities add up to no more than 1 - top_p, as transformers does with an
// ascending sort; of equal ones the highest ids go first. Buckets by distance from the maximum replace the sort: only
// the bucket where the sum crosses the limit is sorted.
class TopP {
 public:
  TopP(const float* z, float z_max, double top_p) : z_(z), z_max_(z_max), limit_(static_cast<float>(1.0 - top_p)) {}

  void apply(Ids& ids) {
    mass_.assign(kBuckets, 0.0);
    double total = 0.0;
    for (const auto id : ids) {
      const double weight = std::exp(static_cast<double>(z_[id]) - z_max_);
      mass_[bucket(id)] += weight;
      total += weight;
    }
    double dropped = 0.0;
    std::size_t border = kBuckets - 1;
    while (border > 0 && static_cast<float>((dropped + mass_[border]) / total) <= limit_) {
      dropped += mass_[border--];
    }
    Ids candidates;
    std::copy_if(ids.begin(), ids.end(), std::back_inserter(candidates), [&](auto id) { return bucket(id) == border; });
    std::sort(candidates.begin(), candidates.end(),
              [&](auto a, auto b) { return z_[a] != z_[b] ? z_[a] < z_[b] : a > b; });
    std::size_t first_kept = 0;
    // The last of bucket 0 is the row's maximum, which always stays.
    const std::size_t must_stay = border == 0 ? 1 : 0;
    for (; first_kept + must_stay < candidates.size(); ++first_kept) {
      dropped += std::exp(static_cast<double>(z_[candidates[first_kept]]) - z_max_);
      if (static_cast<float>(dropped / total) > limit_) {
        break;
      }
    }
    keep(ids, border, candidates, first_kept);
  }

 private:
  static constexpr std::size_t kBuckets = 1024;
  static constexpr double kBucketsPerNat = 32.0;

  std::size_t bucket(std::int32_t id) const {
    const double distance = (static_cast<double>(z_max_) - z_[id]) * kBucketsPerNat;
    return distance < kBuckets - 1 ? static_cast<std::size_t>(distance) : kBuckets - 1;
  }

  void keep(Ids& ids, std::size_t border, const Ids& candidates, std::size_t first_kept) const {
    const bool border_stays = first_kept < candidates.size();
    const float z_border = border_stays ? z_[candidates[first_kept]] : 0.0F;
    const std::int32_t id_border = border_stays ? candidates[first_kept] : -1;
    std::erase_if(ids, [&](auto id) {
      const auto b = bucket(id);
      if (b != border) {
        return b > border;
      }
      return !border_stays || z_[id] < z_border || (z_[id] == z_border && id > id_border);
    });
  }

  const float* z_;
  float z_max_;
  float limit_;
  std::vector<double> mass_;
};

double sum_of_exp(const float* z, std::int64_t n, double z_max) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < n; ++i) {
    sum += std::exp(static_cast<double>(z[i]) - z_max);
  }
  return sum;
}

struct Choice {
  std::int32_t id;
  float logprob;
};

// A token's log-probability by the softmax of a whole row, and the most likely tokens where there is room for them.
float logprob_dense(const float* z, std::int64_t n, float z_max, std::int32_t id, ChairliftTop* top) {
  const double sum = sum_of_exp(z, n, z_max);
  if (top != nullptr) {
    TopTokens best(top->capacity);
    for (std::int64_t i = 0; i < n; ++i) {
      if (z[i] > -kInfinity) {
        best.offer(z[i], static_cast<std::int32_t>(i));
      }
    }
    best.write(*top, id, z[id], z_max, sum);
  }
  return log_share(z[id], z_max, sum);
}

Choice choose_dense(const float* z, std::int64_t n, std::int32_t argmax, const ChairliftSampleParams& params,
                    bool greedy, ChairliftTop* top) {
  const auto id = greedy ? argmax : gumbel_max_dense(z, n, argmax, Noise(params)).id;
  if (params.want_logprob == 0) {
    return {id, std::numeric_limits<float>::quiet_NaN()};
  }
  return {id, logprob_dense(z, n, z[argmax], id, top)};
}

Choice choose_filtered(const float* z, std::int64_t n, std::int32_t argmax, const ChairliftSampleParams& params,
                       ChairliftTop* top) {
  thread_local Ids ids;
  ids.clear();
  const bool by_rank = params.top_k > 0 && params.top_k < n;
  const float lowest = by_rank ? kth_highest(z, n, params.top_k) : -kInfinity;
  for (std::int64_t i = 0; i < n; ++i) {
    if (z[i] >= lowest && z[i] > -kInfinity) {
      ids.push_back(static_cast<std::int32_t>(i));
    }
  }
  const double z_max = z[argmax];
  if (params.top_p < 1.0) {
    TopP(z, z[argmax], params.top_p).apply(ids);
  }
  if (params.min_p > 0.0) {
    const auto limit = static_cast<float>(params.min_p);
    std::erase_if(ids, [&](auto id) { return static_cast<float>(std::exp(z[id] - z_max)) < limit; });
  }
  const Noise noise(params);
  Best best;
  double sum = 0.0;
  for (const auto id : ids) {
    best.offer(z[id] + noise.of(id), id);
    sum += std::exp(z[id] - z_max);
  }
  if (top != nullptr) {
    TopTokens likeliest(top->capacity);
    for (const auto id : ids) {
      likeliest.offer(z[id], id);
    }
    likeliest.write(*top, best.id, z[best.id], z_max, sum);
  }
  return {best.id, log_share(z[best.id], z_max, sum)};
}

// Index of the first maximum, or -1 if a logit is not a number, or is infinite: computing went wrong. Tokens that are
// not to be chosen have -infinity.
std::int32_t first_maximum(const float* logits, std::int64_t n) {
  float highest = -kInfinity;
  bool wrong = false;
  for (std::int64_t i = 0; i < n; ++i) {
    wrong |= !(logits[i] < kInfinity);
    highest = logits[i] > highest ? logits[i] : highest;
  }
  return wrong ? -1 : static_cast<std::int32_t>(std::find(logits, logits + n, highest) - logits);
}

// Logits over temperature, in float as transformers does it. Where the quotient of the maximum is out of range,
// distances from the maximum are divided instead: the same distribution, and nothing can overflow upwards.
void scale(const float* logits, std::int64_t n, float highest, float temperature, std::vector<float>& z) {
  z.resize(static_cast<std::size_t>(n));
  const float shift = std::isfinite(highest / temperature) ? 0.0F : highest;
  for (std::int64_t i = 0; i < n; ++i) {
    z[static_cast<std::size_t>(i)] = (logits[i] - shift) / temperature;
  }
}

}  // namespace

CHAIRLIFT_API std::int32_t chairlift_sample_row(const float* logits, std::int64_t num_logits,
                                                const ChairliftSampleParams* params, std::int32_t* token,
                                                float* logprob, ChairliftTop* top) try {
  thread_local std::vector<float> z;
  const auto argmax = first_maximum(logits, num_logits);
  if (argmax < 0) {
    return kChairliftSampleNotFinite;
  }
  const float highest = logits[argmax];
  if (highest == -kInfinity) {
    return kChairliftSampleNothing;
  }
  const bool greedy = params->temperature < kGreedyBelow;
  const bool filtered = (params->top_k > 0 && params->top_k < num_logits) || params->top_p < 1.0 || params->min_p > 0.0;
  Choice choice{};
  if (greedy) {
    choice = choose_dense(logits, num_logits, argmax, *params, true, top);
  } else {
    scale(logits, num_logits, highest, static_cast<float>(params->temperature), z);
    // Division can make neighbours equal: the first maximum may come earlier now.
    const auto first = first_maximum(z.data(), num_logits);
    choice = filtered ? choose_filtered(z.data(), num_logits, first, *params, top)
                      : choose_dense(z.data(), num_logits, first, *params, false, top);
  }
  *token = choice.id;
  *logprob = choice.logprob;
  return kChairliftSampleOk;
} catch (const std::bad_alloc&) {
  return kChairliftSampleNoMemory;
}

CHAIRLIFT_API std::int32_t chairlift_row_logprobs(const float* logits, std::int64_t num_logits, std::int32_t token,
                                                  float* logprob, ChairliftTop* top) try {
  if (token < 0 || token >= num_logits) {
    return kChairliftSampleUnknownId;
  }
  const auto argmax = first_maximum(logits, num_logits);
  if (argmax < 0) {
    return kChairliftSampleNotFinite;
  }
  if (logits[token] == -kInfinity) {
    return kChairliftSampleNothing;
  }
  *logprob = logprob_dense(logits, num_logits, logits[argmax], token, top);
  return kChairliftSampleOk;
} catch (const std::bad_alloc&) {
  return kChairliftSampleNoMemory;
}

CHAIRLIFT_API void chairlift_philox4x32(const std::uint32_t* counter, const std::uint32_t* key, std::uint32_t* out) {
  const auto block = philox4x32({counter[0], counter[1], counter[2], counter[3]}, {key[0], key[1]});
  std::copy(block.begin(), block.end(), out);
}
