// The most likely tokens of a row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "chairlift/sampling.hpp"

namespace chairlift {

// Log-probability of a token with this logit; finite however far apart logits are.
inline float log_share(float logit, double z_max, double sum) {
  const double value = static_cast<double>(logit) - z_max - std::log(sum);
  return static_cast<float>(std::max(value, static_cast<double>(std::numeric_limits<float>::lowest())));
}

// Collects the best of the tokens that are offered; of equal ones the lowest ids.
class TopTokens {
 public:
  explicit TopTokens(std::int32_t capacity) : capacity_(static_cast<std::size_t>(capacity)) {
    best_.reserve(capacity_);
  }

  void offer(float logit, std::int32_t id) {
    if (logit < worst_) {  // nearly all of them
      return;
    }
    if (best_.size() < capacity_) {
      best_.emplace_back(logit, id);
      std::push_heap(best_.begin(), best_.end(), is_better);
      worst_ = best_.size() == capacity_ ? best_.front().first : worst_;
    } else if (is_better({logit, id}, best_.front())) {
      std::pop_heap(best_.begin(), best_.end(), is_better);
      best_.back() = {logit, id};
      std::push_heap(best_.begin(), best_.end(), is_better);
      worst_ = best_.front().first;
    }
  }

  // Writes them, best first; the chosen one takes the last place if it is not among them.
  void write(ChairliftTop& top, std::int32_t chosen, float chosen_logit, double z_max, double sum) {
    std::sort_heap(best_.begin(), best_.end(), is_better);
    if (std::none_of(best_.begin(), best_.end(), [&](const auto& each) { return each.second == chosen; })) {
      best_.back() = {chosen_logit, chosen};
    }
    top.size = static_cast<std::int32_t>(best_.size());
    for (std::size_t i = 0; i < best_.size(); ++i) {
      top.ids[i] = best_[i].second;
      top.logprobs[i] = log_share(best_[i].first, z_max, sum);
    }
  }

 private:
  using Token = std::pair<float, std::int32_t>;

  static bool is_better(const Token& a, const Token& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  }

  std::size_t capacity_;
  float worst_ = -std::numeric_limits<float>::infinity();  // of the best, once there are as many as there may be
  std::vector<Token> best_;
};

}  // namespace chairlift
