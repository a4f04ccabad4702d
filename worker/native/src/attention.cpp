// The plain C interface of the attention.
#include "chairlift/attention.hpp"

#include <new>

#include "chairlift/attention_run.hpp"
#include "chairlift/isa.hpp"
#include "chairlift/parallel.hpp"

#define CHAIRLIFT_API extern "C" __attribute__((visibility("default")))

using namespace chairlift;

const AttentionKernels* chairlift::find_attention(std::int32_t isa) {
  static const AttentionKernels* const tables[] = {nullptr,          kPortableAttention,   kAvx2Attention,
                                                   kAvx512Attention, kAvx512Bf16Attention, kAvx512Bf16Attention};
  return table_for(tables, isa);
}

static bool is_type(std::int32_t type) { return type == kChairliftFloat32 || type == kChairliftBfloat16; }

bool chairlift::has_shape(const ChairliftAttentionStep& step, const ChairliftAttentionLayer& layer) {
  return (is_type(layer.cache_type) || layer.cache_type == kChairliftInt8) && is_type(layer.io_type) && layer.page_size > 0 && layer.kv_heads > 0 &&
         layer.heads > 0 && layer.heads % layer.kv_heads == 0 && layer.head_dim > 0 && layer.unit_offset >= 0 &&
         layer.window >= 0 && layer.softcap >= 0.0F && step.num_rows >= 0;
}

CHAIRLIFT_API std::int32_t chairlift_attend(const ChairliftAttentionStep* step, const ChairliftAttentionLayer* layer,
                                            const ChairliftAttentionCall* call) try {
  thread_local AttentionPlan plan;
  thread_local Scratch<float> partials;
  if (!has_shape(*step, *layer)) return kChairliftAttentionBadShape;
  const AttentionKernels* kernels = find_attention(layer->isa);
  if (kernels == nullptr) return kChairliftAttentionNoIsa;
  if (!tables_are_valid(*step, *layer)) return kChairliftAttentionBadTable;
  plan.make(*step, *layer, round_up(layer->head_dim, 2 * kernels->lanes));
  AttentionRun run(*step, *layer, *call, *kernels, plan, partials.reserve(plan.partial_floats));
  parallel_region(
      run.is_small() ? 1 : step->num_threads, [](void* all) { static_cast<AttentionRun*>(all)->work(); }, &run);
  return kChairliftAttentionOk;
} catch (const std::bad_alloc&) {
  return kChairliftAttentionNoMemory;
}

CHAIRLIFT_API std::int32_t chairlift_attention_has_isa(std::int32_t isa) { return find_attention(isa) != nullptr; }

CHAIRLIFT_API std::int32_t chairlift_attention_exp(std::int32_t isa, const float* in, float* out, std::int64_t n) {
  const AttentionKernels* kernels = find_attention(isa);
  if (kernels == nullptr) return kChairliftAttentionNoIsa;
  kernels->exp(in, out, n);
  return kChairliftAttentionOk;
}

CHAIRLIFT_API std::int32_t chairlift_attention_tanh(std::int32_t isa, const float* in, float* out, std::int64_t n) {
  const AttentionKernels* kernels = find_attention(isa);
  if (kernels == nullptr) return kChairliftAttentionNoIsa;
  kernels->tanh(in, out, n);
  return kChairliftAttentionOk;
}
