// Choosing the next token of one row of logits. A pure function: the same arguments give the same token on every call,
// whatever else the process does.
#pragma once

#include <cstdint>

extern "C" {

// How to choose; the layout is shared with sampling/native.py.
struct ChairliftSampleParams {
  double temperature;   // below 1e-5 is greedy
  double top_p;         // 1 is off
  double min_p;         // 0 is off
  std::uint64_t seed;
  std::uint64_t index;  // of the token in the output
  std::int64_t top_k;   // <= 0 or >= the row's length is off
  std::int32_t want_logprob;
};

enum ChairliftSampleStatus : std::int32_t {
  kChairliftSampleOk = 0,
  kChairliftSampleNotFinite = 1,  // a logit is not a number, or infinite; -infinity may be, for a token never chosen
  kChairliftSampleNothing = 2,    // no token has any probability
  kChairliftSampleNoMemory = 3,   // there is none for the scratch space
  kChairliftSampleUnknownId = 4,  // a token id is outside the row; see processors.hpp
};

// Room for the most likely tokens of a row, and how many there are.
struct ChairliftTop {
  std::int32_t capacity;  // at least 1
  std::int32_t size;      // written
  std::int32_t* ids;      // written: most likely first, of equal ones the lowest id
  float* logprobs;        // written
};

// Writes the token, and its log-probability among the survivors if wanted (else NaN); and the most likely survivors, if
// `top` is not null, the token always among them. Scratch memory is the calling thread's own.
std::int32_t chairlift_sample_row(const float* logits, std::int64_t num_logits, const ChairliftSampleParams* params,
                                  std::int32_t* token, float* logprob, ChairliftTop* top);

// Writes the log-probability of `token`, and the most likely tokens, by the log-softmax of the row.
std::int32_t chairlift_row_logprobs(const float* logits, std::int64_t num_logits, std::int32_t token, float* logprob,
                                    ChairliftTop* top);

// One Philox4x32-10 block; for tests against the published vectors.
void chairlift_philox4x32(const std::uint32_t* counter, const std::uint32_t* key, std::uint32_t* out);

}  // extern "C"
