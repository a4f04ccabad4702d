// What changes or excludes tokens before one is chosen. A pure function of a row's logits and of its tokens so far:
// nothing is remembered between the rows or the steps.
#pragma once

#include <cstdint>

#include "chairlift/sampling.hpp"

extern "C" {

// Token ids or numbers of the caller's, read only.
struct ChairliftIds {
  const std::int32_t* ids;
  std::int64_t size;
};

// In the order in which they are applied; the layout is shared with sampling/processors.py.
struct ChairliftProcessors {
  ChairliftIds bias_ids;          // to whose logits `biases` are added
  const float* biases;            // one for each of them
  float repetition_penalty;       // of tokens of prompt and output; 1 is off
  float presence_penalty;         // of tokens of the output; 0 is off
  float frequency_penalty;        // of tokens of the output, for each time; 0 is off
  std::int64_t no_repeat_ngram;   // tokens of a run that may not come again; 0 is off
  ChairliftIds banned_sequences;  // one after the other: its length, then its ids
  ChairliftIds early_stops;       // not chosen as one of the first min_new_tokens
  std::int64_t min_new_tokens;
  ChairliftIds allowed;  // nothing else is chosen; none: all may be
  ChairliftIds banned;
};

// A row's tokens so far.
struct ChairliftContext {
  ChairliftIds tokens;      // prompt and output
  std::int64_t num_output;  // how many of them, at the end, are output
};

// Writes the processed logits: finite numbers, and -infinity where a token is not to be chosen. Returns
// kChairliftSampleNotFinite where the model's own are no numbers, kChairliftSampleUnknownId where an id is outside the
// row; `out` then means nothing. Scratch memory is the calling thread's own.
std::int32_t chairlift_process_row(const float* logits, std::int64_t num_logits, const ChairliftProcessors* processors,
                                   const ChairliftContext* context, float* out);

// Writes the logits, -infinity where the bit of a token is not set: bit i % 32 of word i / 32. `out` may be `logits`, which
// are then taken for finite; else kChairliftSampleNotFinite is returned where they are no numbers.
std::int32_t chairlift_mask_row(const float* logits, std::int64_t num_logits, const std::uint32_t* allowed, float* out);

}  // extern "C"
