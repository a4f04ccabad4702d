// The attention kernels against the plain formula, in memory of exactly their size, with one thread and with several.
// Vectors are widened by the build option CHAIRLIFT_LANES to what this machine need not have.
#include <algorithm>
#include <cmath>
#include <memory>

#include "chairlift/attention.hpp"
#include "support.hpp"

namespace {

constexpr int kHeads = 6;
constexpr int kKvHeads = 2;
constexpr int kPageSize = 4;
constexpr int kUnitsPerPage = 2;

struct Row {
  int start;
  int tokens;
};

// Exactly n elements, so that AddressSanitizer sees every step beyond them.
std::unique_ptr<float[]> noise_floats(std::uint64_t seed, std::size_t n) {
  Noise noise(seed);
  auto floats = std::make_unique<float[]>(n);
  for (std::size_t i = 0; i < n; ++i) {
    floats[i] = static_cast<float>(static_cast<double>(noise.below(2001)) / 1000.0 - 1.0);
  }
  return floats;
}

class Case {
 public:
  Case(const std::vector<Row>& rows, int head_dim, int window) : rows_(rows), dim_(head_dim), window_(window) {
    for (const Row& row : rows) {
      starts_.push_back(row.start);
      firsts_.push_back(firsts_.back() + row.tokens);
      stride_ = std::max<std::int64_t>(stride_, (row.start + row.tokens - 1) / kPageSize + 1);
    }
    tables_.assign(rows.size() * static_cast<std::size_t>(stride_), -1);
    std::int32_t page = 0;
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const int lowest = window > 0 ? std::max(0, rows[row].start - window + 1) : 0;
      for (int p = lowest / kPageSize; p <= (rows[row].start + rows[row].tokens - 1) / kPageSize; ++p) {
        tables_[row * static_cast<std::size_t>(stride_) + static_cast<std::size_t>(p)] = page++ * kUnitsPerPage;
      }
    }
    num_units_ = page * kUnitsPerPage;
    cache_ = noise_floats(1, static_cast<std::size_t>(num_units_ * unit()));
    const auto tokens = static_cast<std::size_t>(firsts_.back());
    query_ = noise_floats(2, tokens * kHeads * static_cast<std::size_t>(dim_));
    key_ = noise_floats(3, tokens * kKvHeads * static_cast<std::size_t>(dim_));
    value_ = noise_floats(4, tokens * kKvHeads * static_cast<std::size_t>(dim_));
    out_ = noise_floats(5, tokens * kHeads * static_cast<std::size_t>(dim_));
  }

  std::int32_t attend(std::int32_t isa, int threads) {
    const ChairliftAttentionStep step{firsts_.data(), starts_.data(), tables_.data(), stride_,
                                      static_cast<std::int32_t>(rows_.size()), threads};
    const ChairliftAttentionLayer layer{cache_.get(), nullptr, num_units_, kChairliftFloat32, kChairliftFloat32, isa,
                                        kPageSize,    kHeads,  kKvHeads,   dim_,              0, window_, kScale, 0.0F};
    const ChairliftAttentionCall call{tensor(query_.get(), kHeads), tensor(key_.get(), kKvHeads),
                                      tensor(value_.get(), kKvHeads), tensor(out_.get(), kHeads)};
    return chairlift_attend(&step, &layer, &call);
  }

  void check_output() const {
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      for (int token = 0; token < rows_[row].tokens; ++token) {
        for (int head = 0; head < kHeads; ++head) {
          check_head(row, token, head);
        }
      }
    }
  }

  std::vector<float> output() const { return {out_.get(), out_.get() + firsts_.back() * kHeads * dim_}; }
  void lose_a_page() { tables_.back() = -1; }

 private:
  static constexpr float kScale = 0.4F;

  int unit() const { return kPageSize * kKvHeads * dim_; }
  ChairliftAttentionTensor tensor(const float* data, int heads) const { return {data, heads * dim_, dim_}; }

  // The cache holds the new tokens by now, too.
  const float* element(std::size_t row, int position, int head, int is_value) const {
    const int base = tables_[row * static_cast<std::size_t>(stride_) + static_cast<std::size_t>(position / kPageSize)];
    const int slot = position % kPageSize * kKvHeads + head / (kHeads / kKvHeads);
    return cache_.get() + (base + is_value) * unit() + slot * dim_;
  }

  void check_head(std::size_t row, int token, int head) const {
    const int position = rows_[row].start + token;
    const auto at = ((firsts_[row] + token) * kHeads + head) * dim_;
    std::vector<double> sums(static_cast<std::size_t>(dim_));
    double total = 0;
    for (int p = window_ > 0 ? std::max(0, position - window_ + 1) : 0; p <= position; ++p) {
      double score = 0;
      for (int d = 0; d < dim_; ++d) {
        score += static_cast<double>(query_[static_cast<std::size_t>(at + d)]) * element(row, p, head, 0)[d];
      }
      const double weight = std::exp(score * kScale);
      total += weight;
      for (int d = 0; d < dim_; ++d) {
        sums[static_cast<std::size_t>(d)] += weight * element(row, p, head, 1)[d];
      }
    }
    for (int d = 0; d < dim_; ++d) {
      CHECK(std::fabs(sums[static_cast<std::size_t>(d)] / total - out_[static_cast<std::size_t>(at + d)]) < 1e-5);
    }
  }

  std::vector<Row> rows_;
  int dim_;
  int window_;
  std::int64_t stride_ = 0;
  std::int32_t num_units_ = 0;
  std::vector<std::int32_t> starts_;
  std::vector<std::int32_t> firsts_{0};
  std::vector<std::int32_t> tables_;
  std::unique_ptr<float[]> cache_, query_, key_, value_, out_;
};

const std::vector<Row> kRows{{300, 1}, {0, 1}, {3, 2}, {0, 70}, {255, 1}, {520, 3}, {90, 25}};

void every_instruction_set_and_number_of_threads_gives_what_the_formula_says() {
  for (std::int32_t isa = kChairliftIsaPortable; isa <= kChairliftIsaAvx512Bf16; ++isa) {
    if (chairlift_attention_has_isa(isa) == 0) continue;
    for (const int head_dim : {5, 64, 80}) {
      for (const int window : {0, 40}) {
        Case one(kRows, head_dim, window);
        CHECK(one.attend(isa, 1) == kChairliftAttentionOk);
        one.check_output();
        Case four(kRows, head_dim, window);
        CHECK(four.attend(isa, 4) == kChairliftAttentionOk);
        CHECK(one.output() == four.output());
      }
    }
  }
}

void a_call_that_cannot_be_is_refused_and_writes_nothing() {
  Case lost(kRows, 64, 0);
  lost.lose_a_page();  // the last row does not reach that entry
  CHECK(lost.attend(kChairliftIsaBest, 1) == kChairliftAttentionOk);
  Case needed({{9, 1}}, 64, 0);
  const auto untouched = needed.output();
  needed.lose_a_page();
  CHECK(needed.attend(kChairliftIsaBest, 1) == kChairliftAttentionBadTable);
  CHECK(needed.output() == untouched);
  CHECK(needed.attend(99, 1) == kChairliftAttentionNoIsa);
  CHECK(Case({{9, 1}}, 0, 0).attend(kChairliftIsaBest, 1) == kChairliftAttentionBadShape);
}

}  // namespace

int main() {
  every_instruction_set_and_number_of_threads_gives_what_the_formula_says();
  a_call_that_cannot_be_is_refused_and_writes_nothing();
}
