// The plain C interface of the decoder.
#include "chairlift/decoder.hpp"

#include <new>
#include <vector>

#include "chairlift/decoder_run.hpp"
#include "chairlift/isa.hpp"
#include "chairlift/parallel.hpp"

#define CHAIRLIFT_API extern "C" __attribute__((visibility("default")))

using namespace chairlift;

namespace {

const DecoderKernels* amx_decoder() {
  if (kAmxMultiplyBf16 == nullptr || kAvx512Bf16Decoder == nullptr) return nullptr;
  static const DecoderKernels kernels = [] {
    DecoderKernels all = *kAvx512Bf16Decoder;
    all.multiply[kFormatBfloat16] = kAmxMultiplyBf16;
    return all;
  }();
  return &kernels;
}

const DecoderKernels* find_decoder(std::int32_t isa) {
  static const DecoderKernels* const tables[] = {nullptr,        kPortableDecoder,   kAvx2Decoder,
                                                 kAvx512Decoder, kAvx512Bf16Decoder, amx_decoder()};
  return table_for(tables, isa);
}

bool is_sound(const ChairliftMatrix& matrix, std::int64_t outputs, std::int64_t inputs) {
  return matrix.blocks != nullptr && matrix.format >= 0 && matrix.format < kFormats && matrix.outputs == outputs &&
         matrix.inputs == inputs && outputs > 0 && inputs > 0;
}

bool is_sound(const ChairliftDecoder& decoder, const ChairliftDecoderLayer& layer, const ChairliftDecoderStep& step) {
  const ChairliftAttentionLayer& shape = layer.attention;
  if (layer.group < 0 || layer.group >= step.num_groups || layer.rope < -1 || layer.rope >= step.num_ropes) return false;
  if (!has_shape(step.groups[layer.group], shape) || shape.io_type != kChairliftFloat32) return false;
  const std::int64_t heads = std::int64_t{shape.heads} * shape.head_dim;
  const std::int64_t kv_heads = std::int64_t{shape.kv_heads} * shape.head_dim;
  return is_sound(layer.qkv, heads + 2 * kv_heads, decoder.hidden) && is_sound(layer.out, decoder.hidden, heads) &&
         is_sound(layer.gate_up, 2 * round_up(decoder.inner, kGroup), decoder.hidden) &&
         is_sound(layer.down, decoder.hidden, decoder.inner) && layer.attention_norm != nullptr &&
         layer.mlp_norm != nullptr && shape.head_dim % 2 == 0;
}

bool is_sound(const ChairliftDecoder& decoder, const ChairliftDecoderStep& step) {
  if (decoder.num_layers < 1 || decoder.norm == nullptr || step.num_tokens < 1 || step.num_sampled < 0) return false;
  if (!is_sound(decoder.embedding, decoder.embedding.outputs, decoder.hidden)) return false;
  if (!is_sound(decoder.head, decoder.head.outputs, decoder.hidden)) return false;
  if (step.logits_stride < round_up(decoder.head.outputs, kBlock)) return false;
  for (std::int32_t i = 0; i < step.num_groups; ++i) {
    const ChairliftAttentionStep& rows = step.groups[i];
    if (rows.num_rows < 1 || rows.row_first[rows.num_rows] != step.num_tokens) return false;
  }
  for (std::int32_t i = 0; i < decoder.num_layers; ++i) {
    if (!is_sound(decoder, decoder.layers[i], step)) return false;
  }
  for (std::int32_t i = 0; i < step.num_tokens; ++i) {
    if (step.tokens[i] < 0 || step.tokens[i] >= decoder.embedding.outputs || step.positions[i] < 0) return false;
  }
  for (std::int32_t i = 0; i < step.num_sampled; ++i) {
    if (step.sampled[i] < 0 || step.sampled[i] >= step.num_tokens) return false;
  }
  return true;
}

// Each group's tables, by one of its layers with the largest offset.
bool has_tables(const ChairliftDecoder& decoder, const ChairliftDecoderStep& step) {
  std::vector<const ChairliftAttentionLayer*> last(static_cast<std::size_t>(step.num_groups), nullptr);
  for (std::int32_t i = 0; i < decoder.num_layers; ++i) {
    const ChairliftDecoderLayer& layer = decoder.layers[i];
    const ChairliftAttentionLayer*& known = last[static_cast<std::size_t>(layer.group)];
    if (known == nullptr || known->unit_offset < layer.attention.unit_offset) known = &layer.attention;
  }
  for (std::int32_t i = 0; i < step.num_groups; ++i) {
    const ChairliftAttentionLayer* layer = last[static_cast<std::size_t>(i)];
    if (layer != nullptr && !tables_are_valid(step.groups[i], *layer)) return false;
  }
  return true;
}

constexpr std::int64_t kAloneWork = 1 << 21;  // multiplications under which waking other threads costs more

std::int64_t size_of(const ChairliftMatrix& matrix) { return std::int64_t{matrix.outputs} * matrix.inputs; }

// Multiplications of a pass, those of the attention left out.
std::int64_t work_of(const ChairliftDecoder& decoder, const ChairliftDecoderStep& step) {
  std::int64_t each = 0;
  for (std::int32_t i = 0; i < decoder.num_layers; ++i) {
    const ChairliftDecoderLayer& layer = decoder.layers[i];
    each += size_of(layer.qkv) + size_of(layer.out) + size_of(layer.gate_up) + size_of(layer.down);
  }
  return each * step.num_tokens + size_of(decoder.head) * step.num_sampled;
}

}  // namespace

CHAIRLIFT_API std::int32_t chairlift_decode(const ChairliftDecoder* decoder, const ChairliftDecoderStep* step) try {
  thread_local DecoderMemory memory;
  const DecoderKernels* kernels = find_decoder(decoder->isa);
  const AttentionKernels* attention = find_attention(decoder->isa);
  if (kernels == nullptr || attention == nullptr) return kChairliftDecoderNoIsa;
  if (!is_sound(*decoder, *step)) return kChairliftDecoderBadShape;
  if (!has_tables(*decoder, *step)) return kChairliftDecoderBadTable;
  DecoderRun run(*decoder, *step, *kernels, *attention, memory);
  parallel_region(
      work_of(*decoder, *step) < kAloneWork ? 1 : step->num_threads, [](void* all) { static_cast<DecoderRun*>(all)->work(region_threads()); }, &run);
  return kChairliftDecoderOk;
} catch (const std::bad_alloc&) {
  return kChairliftDecoderNoMemory;
}

CHAIRLIFT_API std::int64_t chairlift_block_bytes(std::int32_t format, std::int64_t inputs) {
  return block_bytes(format, inputs);
}

CHAIRLIFT_API std::int32_t chairlift_multiply(std::int32_t isa, const ChairliftMatrix* matrix, const float* rows,
                                              std::int32_t num_rows, float* out, std::int64_t stride) try {
  const DecoderKernels* kernels = find_decoder(isa);
  if (kernels == nullptr) return kChairliftDecoderNoIsa;
  if (!is_sound(*matrix, matrix->outputs, matrix->inputs) || num_rows < 1 ||
      stride < round_up(matrix->outputs, kBlock)) {
    return kChairliftDecoderBadShape;
  }
  const std::int64_t width = round_up(matrix->inputs, kGroup);
  const std::int64_t bytes = kernels->row_bytes[matrix->format](width);
  Scratch<float> line;
  Scratch<std::byte> prepared;
  std::byte* ready = prepared.reserve((num_rows + kRowsBeyond) * bytes);
  float* padded = line.reserve(width);
  for (std::int32_t r = 0; r < num_rows; ++r) {
    std::copy_n(rows + std::int64_t{r} * matrix->inputs, matrix->inputs, padded);
    kernels->prepare[matrix->format](padded, width, width, 0, ready + r * bytes);
  }
  kernels->multiply[matrix->format]({.rows = ready,
                                     .row_bytes = bytes,
                                     .num_rows = num_rows,
                                     .num_inputs = static_cast<std::int32_t>(width),
                                     .blocks = static_cast<const std::byte*>(matrix->blocks),
                                     .block_bytes = block_bytes(matrix->format, matrix->inputs),
                                     .num_blocks = (matrix->outputs + kBlock - 1) / kBlock,
                                     .num_following = 0,
                                     .out = out,
                                     .out_stride = stride});
  return kChairliftDecoderOk;
} catch (const std::bad_alloc&) {
  return kChairliftDecoderNoMemory;
}
