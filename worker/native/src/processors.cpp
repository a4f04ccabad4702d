// The processors of transformers, in its order, on one row: sequence bias, repetition penalty, then presence and
// frequency penalties, which it lacks, then what excludes tokens. See processors.hpp.
#include "chairlift/processors.hpp"

#include <algorithm>
#include <limits>
#include <new>
#include <span>
#include <vector>

#define CHAIRLIFT_API extern "C" __attribute__((visibility("default")))

namespace {

using Tokens = std::span<const std::int32_t>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

Tokens span_of(const ChairliftIds& ids) { return {ids.ids, static_cast<std::size_t>(ids.size)}; }

// How often ids were counted. Counting anew costs nothing: what was counted before is told apart by its round.
class Counts {
 public:
  void begin(std::size_t num_ids) {
    if (rounds_.size() < num_ids) {
      rounds_.resize(num_ids, 0);
      counts_.resize(num_ids);
    }
    if (++round_ == 0) {  // rounds that are 2^32 old would be taken for new
      std::fill(rounds_.begin(), rounds_.end(), 0);
      round_ = 1;
    }
    seen_.clear();
  }

  void count(std::int32_t id) {
    const auto place = static_cast<std::size_t>(id);
    if (rounds_[place] != round_) {
      rounds_[place] = round_;
      counts_[place] = 0;
      seen_.push_back(id);
    }
    ++counts_[place];
  }

  const std::vector<std::int32_t>& seen() const { return seen_; }
  std::int32_t of(std::int32_t id) const { return counts_[static_cast<std::size_t>(id)]; }

 private:
  std::uint32_t round_ = 0;
  std::vector<std::uint32_t> rounds_;
  std::vector<std::int32_t> counts_;
  std::vector<std::int32_t> seen_;
};

class Row {
 public:
  Row(float* logits, std::int64_t size) : logits_(logits), size_(static_cast<std::size_t>(size)) {}

  bool knows(Tokens ids) const {
    return std::all_of(ids.begin(), ids.end(), [&](auto id) { return static_cast<std::uint32_t>(id) < size_; });
  }

  void add(Tokens ids, const float* biases) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      set(ids[i], at(ids[i]) + biases[i]);
    }
  }

  void penalise_repetition(Tokens tokens, float penalty) {
    counts().begin(size_);
    std::for_each(tokens.begin(), tokens.end(), [](auto id) { counts().count(id); });
    for (const auto id : counts().seen()) {
      set(id, at(id) < 0 ? at(id) * penalty : at(id) / penalty);
    }
  }

  void penalise_output(Tokens output, float presence, float frequency) {
    counts().begin(size_);
    std::for_each(output.begin(), output.end(), [](auto id) { counts().count(id); });
    for (const auto id : counts().seen()) {
      set(id, at(id) - frequency * static_cast<float>(counts().of(id)) - presence);
    }
  }

  // Runs of `size` tokens that would come again: their last tokens.
  void ban_repeated(Tokens tokens, std::int64_t size) {
    if (size > static_cast<std::int64_t>(tokens.size())) {
      return;
    }
    const auto num_before = static_cast<std::size_t>(size) - 1;
    const auto newest = tokens.last(num_before);
    for (std::size_t end = num_before; end < tokens.size(); ++end) {
      if (std::equal(newest.rbegin(), newest.rend(), tokens.first(end).rbegin())) {
        ban(tokens[end]);
      }
    }
  }

  void ban_sequences(Tokens sequences, Tokens tokens) {
    for (std::size_t begin = 0; begin < sequences.size();) {
      const auto length = static_cast<std::size_t>(sequences[begin]);
      const auto sequence = sequences.subspan(begin + 1, length);
      const auto before = sequence.first(length - 1);
      if (before.size() <= tokens.size() && std::equal(before.rbegin(), before.rend(), tokens.rbegin())) {
        ban(sequence.back());
      }
      begin += 1 + length;
    }
  }

  void ban_all(Tokens ids) {
    for (const auto id : ids) {
      ban(id);
    }
  }

  void ban_others(Tokens allowed) {
    thread_local std::vector<float> kept;
    kept.clear();
    for (const auto id : allowed) {
      kept.push_back(at(id));
    }
    std::fill(logits_, logits_ + size_, -kInfinity);
    for (std::size_t i = 0; i < allowed.size(); ++i) {
      logits_[allowed[i]] = kept[i];
    }
  }

 private:
  static Counts& counts() {
    thread_local Counts of_thread;
    return of_thread;
  }

  float at(std::int32_t id) const { return logits_[id]; }

  // What the model itself excludes stays so; what is not excluded stays a number, however extreme.
  void set(std::int32_t id, float value) {
    if (logits_[id] > -kInfinity) {
      logits_[id] = std::clamp(value, -kLargest, kLargest);
    }
  }

  void ban(std::int32_t id) { logits_[id] = -kInfinity; }

  float* logits_;
  std::size_t size_;
};

// Copies a row; false if a logit is not a number, or is infinite.
bool copy_checked(const float* logits, std::int64_t size, float* out) {
  bool wrong = false;
  for (std::int64_t i = 0; i < size; ++i) {
    wrong |= !(logits[i] < kInfinity);
    out[i] = logits[i];
  }
  return !wrong;
}

bool are_known(const Row& row, Tokens sequences) {
  for (std::size_t begin = 0; begin < sequences.size();) {
    const auto length = sequences[begin];
    if (length < 1 || static_cast<std::size_t>(length) >= sequences.size() - begin ||
        !row.knows(sequences.subspan(begin + 1, static_cast<std::size_t>(length)))) {
      return false;
    }
    begin += 1 + static_cast<std::size_t>(length);
  }
  return true;
}

}  // namespace

CHAIRLIFT_API std::int32_t chairlift_process_row(const float* logits, std::int64_t num_logits,
                                                 const ChairliftProcessors* processors, const ChairliftContext* context,
                                                 float* out) try {
  const auto& p = *processors;
  const auto tokens = span_of(context->tokens);
  Row row(out, num_logits);
  for (const auto& ids : {context->tokens, p.bias_ids, p.early_stops, p.allowed, p.banned}) {
    if (!row.knows(span_of(ids))) {
      return kChairliftSampleUnknownId;
    }
  }
  if (!are_known(row, span_of(p.banned_sequences))) {
    return kChairliftSampleUnknownId;
  }
  if (!copy_checked(logits, num_logits, out)) {
    return kChairliftSampleNotFinite;
  }
  row.add(span_of(p.bias_ids), p.biases);
  if (p.repetition_penalty != 1.0F) {
    row.penalise_repetition(tokens, p.repetition_penalty);
  }
  if (p.presence_penalty != 0.0F || p.frequency_penalty != 0.0F) {
    const auto num_output = static_cast<std::size_t>(context->num_output);
    row.penalise_output(tokens.last(std::min(num_output, tokens.size())), p.presence_penalty, p.frequency_penalty);
  }
  if (p.no_repeat_ngram > 0) {
    row.ban_repeated(tokens, p.no_repeat_ngram);
  }
  row.ban_sequences(span_of(p.banned_sequences), tokens);
  if (context->num_output < p.min_new_tokens) {
    row.ban_all(span_of(p.early_stops));
  }
  if (p.allowed.size > 0) {
    row.ban_others(span_of(p.allowed));
  }
  row.ban_all(span_of(p.banned));
  return kChairliftSampleOk;
} catch (const std::bad_alloc&) {
  return kChairliftSampleNoMemory;
}

CHAIRLIFT_API std::int32_t chairlift_mask_row(const float* logits, std::int64_t num_logits,
                                              const std::uint32_t* allowed, float* out) {
  if (logits != out && !copy_checked(logits, num_logits, out)) {
    return kChairliftSampleNotFinite;
  }
  for (std::int64_t i = 0; i < num_logits; ++i) {
    if (((allowed[i / 32] >> (i % 32)) & 1U) == 0) {
      out[i] = -kInfinity;
    }
  }
  return kChairliftSampleOk;
}
