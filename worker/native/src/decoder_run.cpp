#include "chairlift/decoder_run.hpp"

#include <algorithm>

namespace chairlift {
namespace {

constexpr std::int32_t kAloneRows = 4;    // so few rows each thread makes for itself: that is faster than to wait for others
constexpr std::int32_t kPanelRows = 64;   // rows of a piece of a product
constexpr std::int32_t kPieceBlocks = 4;  // blocks of a piece of a product
constexpr std::int32_t kLeastBlocks = 2;  // that a thread takes at a time of a product with few rows
constexpr std::int32_t kPiecesEach = 8;   // pieces of other work that a thread should find, so that all end together

std::int64_t padded(std::int64_t inputs) { return round_up(inputs, kGroup); }
std::int32_t num_blocks(const ChairliftMatrix& matrix) { return (matrix.outputs + kBlock - 1) / kBlock; }
std::int32_t pieces_of(std::int32_t count, std::int32_t piece) { return (count + piece - 1) / piece; }

}  // namespace

std::int64_t block_bytes(std::int32_t format, std::int64_t inputs) {
  const std::int64_t n = padded(inputs);
  constexpr std::int64_t kNumbers = 2 * kBlock * static_cast<std::int64_t>(sizeof(Bf16));
  switch (format) {
    case kFormatFloat32:
      return n * kBlock * 4;
    case kFormatBfloat16:
      return n * kBlock * 2;
    case kFormatInt8:
      return n / kGroup * (kNumbers + kBlock * kGroup);
    case kFormatInt4:
      return n / kGroup * (kNumbers + kBlock * kGroup / 2);
    default:
      return 0;
  }
}

// A thread's place in the pass, and memory of its own.
struct DecoderRun::Thread {
  std::int32_t size;       // threads in the region
  std::int32_t phase = 0;  // the same for all threads that are in the same phase
  bool first = false;      // whether it makes ready what there is one of
  Scratch<float>& line;
  Scratch<float>& tile;
  Scratch<std::byte>& rows;
};

DecoderRun::DecoderRun(const ChairliftDecoder& decoder, const ChairliftDecoderStep& step,
                       const DecoderKernels& kernels, const AttentionKernels& attention, DecoderMemory& memory)
    : decoder_(decoder), step_(step), kernels_(kernels), attention_kernels_(attention), memory_(memory) {
  const std::int64_t tokens = step.num_tokens;
  std::int64_t qkv = 0;
  std::int64_t attended = 0;
  std::int64_t row = 0;
  std::int64_t inner = 0;
  for (std::int32_t i = 0; i < decoder.num_layers; ++i) {
    const ChairliftDecoderLayer& layer = decoder.layers[i];
    qkv = std::max(qkv, round_up(layer.qkv.outputs, kBlock));
    attended = std::max(attended, padded(layer.out.inputs));
    row = std::max({row, kernels.row_bytes[layer.qkv.format](padded(layer.qkv.inputs)),
                    kernels.row_bytes[layer.out.format](padded(layer.out.inputs)),
                    kernels.row_bytes[layer.gate_up.format](padded(layer.gate_up.inputs))});
    inner = std::max(inner, kernels.row_bytes[layer.down.format](padded(layer.down.inputs)));
  }
  row = std::max(row, kernels.row_bytes[decoder.head.format](padded(decoder.hidden)));
  hidden_ = memory.hidden.reserve(tokens * decoder.hidden);
  other_ = memory.other.reserve(tokens * round_up(decoder.hidden, kBlock));
  qkv_ = memory.qkv.reserve(tokens * qkv);
  attended_ = memory.attended.reserve(tokens * attended);
  rows_ = memory.rows.reserve((std::max<std::int64_t>(tokens, step.num_sampled) + kRowsBeyond) * row);
  inner_ = memory.inner.reserve((tokens + kRowsBeyond) * inner);
  memory.team.reset(decoder.num_layers * 12 + 4);
}

// Calls use(first, last) for pieces of [0, count), each once, and waits until all are done.
template <class Use>
void DecoderRun::share(Thread& thread, std::int32_t count, std::int32_t piece, Use use) {
  const std::int32_t phase = thread.phase++;
  for (std::int32_t first; (first = memory_.team.take(phase) * piece) < count;) {
    use(first, std::min(count, first + piece));
  }
  memory_.team.meet(thread.size);
}

// Prepared rows for a product: make(i, line) writes row i of activations. Afterwards all threads may read them.
template <class Make>
const std::byte* DecoderRun::make_rows(Thread& thread, const ChairliftMatrix& matrix, std::int32_t count, Make make) {
  const std::int64_t width = padded(matrix.inputs);
  const std::int64_t bytes = kernels_.row_bytes[matrix.format](width);
  float* line = thread.line.reserve(width);
  std::fill(line + matrix.inputs, line + width, 0.0F);
  const bool alone = count <= kAloneRows;
  std::byte* rows = alone ? thread.rows.reserve((count + kRowsBeyond) * bytes) : rows_;
  const auto use = [&](std::int32_t first, std::int32_t last) {
    for (std::int32_t i = first; i < last; ++i) {
      kernels_.prepare[matrix.format](make(i, line), width, width, 0, rows + i * bytes);
    }
  };
  if (alone) {
    use(0, count);
  } else {
    share(thread, count, std::max(1, count / (kPiecesEach * thread.size)), use);
  }
  return rows;
}

// Calls finish(first_row, num_rows, first_block, num_blocks, call) with the pieces of a product.
template <class Finish>
void DecoderRun::multiply(Thread& thread, const Product& product, Finish finish) {
  const std::int32_t blocks = num_blocks(product.matrix);
  const std::int32_t panels = pieces_of(product.num_rows, kPanelRows);
  const std::int64_t bytes = block_bytes(product.matrix.format, product.matrix.inputs);
  const std::int32_t phase = thread.phase++;
  MatmulCall call{.rows = nullptr,
                  .row_bytes = product.row_bytes,
                  .num_rows = 0,
                  .num_inputs = static_cast<std::int32_t>(padded(product.matrix.inputs)),
                  .blocks = nullptr,
                  .block_bytes = bytes,
                  .num_blocks = 0,
                  .num_following = 0,
                  .out = thread.tile.reserve(std::int64_t{kPanelRows} * kPieceBlocks * kBlock),
                  .out_stride = std::int64_t{kPieceBlocks} * kBlock};
  const auto piece = [&](std::int32_t panel, std::int32_t first_block, std::int32_t last_block) {
    const std::int32_t first_row = product.num_rows * panel / panels;
    call.num_rows = product.num_rows * (panel + 1) / panels - first_row;
    call.rows = product.rows + first_row * product.row_bytes;
    call.num_blocks = std::min(kPieceBlocks, last_block - first_block);
    call.num_following = last_block - first_block - call.num_blocks;
    call.blocks = static_cast<const std::byte*>(product.matrix.blocks) + first_block * bytes;
    finish(first_row, call.num_rows, first_block, call.num_blocks, call);
  };
  if (panels == 1) {
    for (;;) {
      const Team::Run run = memory_.team.take_run(phase, blocks, product.least_blocks, thread.size);
      if (run.first >= run.last) break;
      for (std::int32_t block = run.first; block < run.last; block += kPieceBlocks) {
        piece(0, block, run.last);
      }
    }
  } else {
    const std::int32_t count = pieces_of(blocks, kPieceBlocks) * panels;
    for (std::int32_t number; (number = memory_.team.take(phase)) < count;) {
      const std::int32_t block = number / panels * kPieceBlocks;
      piece(number % panels, block, std::min(blocks, block + kPieceBlocks));
    }
  }
  memory_.team.meet(thread.size);
}

// The product and its bias, `stride` floats from row to row; stride is at least whole blocks.
void DecoderRun::multiply_into(Thread& thread, const Product& product, float* out, std::int64_t stride) {
  const float* bias = product.matrix.bias;
  multiply(thread, product, [&](std::int32_t first_row, std::int32_t rows, std::int32_t first_block, std::int32_t count,
                                MatmulCall call) {
    const std::int64_t column = std::int64_t{first_block} * kBlock;
    call.out = out + first_row * stride + column;
    call.out_stride = stride;
    kernels_.multiply[product.matrix.format](call);
    const std::int64_t width = std::min<std::int64_t>(count * kBlock, product.matrix.outputs - column);
    for (std::int32_t r = 0; bias != nullptr && r < rows; ++r) {
      kernels_.add(bias + column, width, call.out + r * stride);
    }
  });
}

// Adds a product to the residual stream, through a norm if there is one.
void DecoderRun::add_product(Thread& thread, const Product& product, const float* norm) {
  const std::int64_t stride = round_up(decoder_.hidden, kBlock);
  if (norm != nullptr) {
    multiply_into(thread, product, other_, stride);
    float* line = thread.line.reserve(decoder_.hidden);
    share(thread, product.num_rows, 1, [&](std::int32_t token, std::int32_t) {
      kernels_.rms_norm(other_ + token * stride, norm, decoder_.hidden, decoder_.eps, line);
      kernels_.add(line, decoder_.hidden, hidden_of(token));
    });
    return;
  }
  multiply(thread, product, [&](std::int32_t first_row, std::int32_t rows, std::int32_t first_block, std::int32_t count,
                                const MatmulCall& call) {
    kernels_.multiply[product.matrix.format](call);
    const std::int64_t column = std::int64_t{first_block} * kBlock;
    const std::int64_t width = std::min<std::int64_t>(count * kBlock, product.matrix.outputs - column);
    for (std::int32_t r = 0; r < rows; ++r) {
      float* to = hidden_of(first_row + r) + column;
      kernels_.add(call.out + r * call.out_stride, width, to);
      if (product.matrix.bias != nullptr) kernels_.add(product.matrix.bias + column, width, to);
    }
  });
}

void DecoderRun::work(std::int32_t size) noexcept {
  thread_local Scratch<float> line;
  thread_local Scratch<float> tile;
  thread_local Scratch<std::byte> rows;
  Thread thread{.size = size, .first = memory_.team.take(0) == 0, .line = line, .tile = tile, .rows = rows};
  thread.phase = 1;
  embed(thread);
  for (std::int32_t i = 0; i < decoder_.num_layers; ++i) {
    run_layer(thread, decoder_.layers[i]);
  }
  make_logits(thread);
}

void DecoderRun::embed(Thread& thread) {
  const ChairliftMatrix& matrix = decoder_.embedding;
  const std::int64_t bytes = block_bytes(matrix.format, matrix.inputs);
  share(thread, step_.num_tokens, std::max(1, step_.num_tokens / (kPiecesEach * thread.size)),
        [&](std::int32_t first, std::int32_t last) {
          for (std::int32_t i = first; i < last; ++i) {
            const std::int64_t token = step_.tokens[i];
            const auto* block = static_cast<const std::byte*>(matrix.blocks) + token / kBlock * bytes;
            kernels_.unpack[matrix.format](block, static_cast<std::int32_t>(token % kBlock), decoder_.hidden, hidden_of(i));
            if (decoder_.embedding_scale != 1.0F) {
              kernels_.scale(decoder_.embedding_scale, decoder_.hidden, hidden_of(i));
            }
          }
        });
}

void DecoderRun::run_layer(Thread& thread, const ChairliftDecoderLayer& layer) {
  const std::int32_t tokens = step_.num_tokens;
  const std::byte* rows = make_rows(thread, layer.qkv, tokens, [&](std::int32_t i, float* line) {
    kernels_.rms_norm(hidden_of(i), layer.attention_norm, decoder_.hidden, decoder_.eps, line);
    return line;
  });
  multiply_into(thread,
                {.matrix = layer.qkv,
                 .rows = rows,
                 .row_bytes = kernels_.row_bytes[layer.qkv.format](padded(layer.qkv.inputs)),
                 .num_rows = tokens,
                 .least_blocks = kLeastBlocks},
                qkv_, round_up(layer.qkv.outputs, kBlock));
  turn(thread, layer);
  attend(thread);
  const std::int64_t width = padded(layer.out.inputs);
  rows = make_rows(thread, layer.out, tokens, [&](std::int32_t i, float* line) {
    if (width == layer.out.inputs) return attended_ + i * width;
    std::copy_n(attended_ + i * width, layer.out.inputs, line);
    return line;
  });
  add_product(thread,
              {.matrix = layer.out,
               .rows = rows,
               .row_bytes = kernels_.row_bytes[layer.out.format](width),
               .num_rows = tokens,
               .least_blocks = kLeastBlocks},
              layer.after_attention_norm);
  feed_forward(thread, layer);
}

// Norms and positions of queries and keys; meanwhile one thread makes the attention ready.
void DecoderRun::turn(Thread& thread, const ChairliftDecoderLayer& layer) {
  const ChairliftAttentionLayer& shape = layer.attention;
  const std::int64_t stride = round_up(layer.qkv.outputs, kBlock);
  if (thread.first) {
    const std::int64_t head = shape.head_dim;
    const std::int64_t width = padded(layer.out.inputs);
    attention_call_ = {
        .query = {.data = qkv_, .token_stride = stride, .head_stride = head},
        .key = {.data = qkv_ + shape.heads * head, .token_stride = stride, .head_stride = head},
        .value = {.data = qkv_ + (shape.heads + shape.kv_heads) * head, .token_stride = stride, .head_stride = head},
        .out = {.data = attended_, .token_stride = width, .head_stride = head}};
    const ChairliftAttentionStep& rows = step_.groups[layer.group];
    AttentionPlan& plan = memory_.plan;
    plan.make(rows, shape, round_up(head, 2 * attention_kernels_.lanes));
    attention_.emplace(rows, shape, attention_call_, attention_kernels_, plan, memory_.partials.reserve(plan.partial_floats));
  }
  const std::int32_t heads = shape.heads + shape.kv_heads;
  const std::int32_t count = layer.rope < 0 && layer.query_norm == nullptr ? 0 : step_.num_tokens * heads;
  const std::int64_t half = shape.head_dim / 2;
  share(thread, count, std::max(1, count / (kPiecesEach * thread.size)), [&](std::int32_t first, std::int32_t last) {
    for (std::int32_t i = first; i < last; ++i) {
      const std::int64_t token = i / heads;
      const std::int32_t head = i % heads;
      float* x = qkv_ + token * stride + std::int64_t{head} * shape.head_dim;
      const float* norm = head < shape.heads ? layer.query_norm : layer.key_norm;
      if (norm != nullptr) kernels_.rms_norm(x, norm, shape.head_dim, decoder_.eps, x);
      if (layer.rope < 0) continue;
      const ChairliftRope& rope = step_.ropes[layer.rope];
      const std::int64_t at = step_.positions[token] * half;
      kernels_.rotate(x, rope.cosines + at, rope.sines + at, half);
    }
  });
}

void DecoderRun::attend(Thread& thread) {
  ++thread.phase;
  attention_->work();
  memory_.team.meet(thread.size);
}

void DecoderRun::feed_forward(Thread& thread, const ChairliftDecoderLayer& layer) {
  const std::int32_t tokens = step_.num_tokens;
  const std::int64_t inner = padded(layer.down.inputs);
  const std::int64_t inner_bytes = kernels_.row_bytes[layer.down.format](inner);
  const std::byte* rows = make_rows(thread, layer.gate_up, tokens, [&](std::int32_t i, float* line) {
    kernels_.rms_norm(hidden_of(i), layer.mlp_norm, decoder_.hidden, decoder_.eps, line);
    return line;
  });
  const Product pairs{.matrix = layer.gate_up,
                      .rows = rows,
                      .row_bytes = kernels_.row_bytes[layer.gate_up.format](padded(layer.gate_up.inputs)),
                      .num_rows = tokens,
                      .least_blocks = kPieceBlocks};  // two gates and what they gate: a group of the next product's inputs
  multiply(thread, pairs, [&](std::int32_t first_row, std::int32_t count, std::int32_t first_block, std::int32_t,
                              const MatmulCall& call) {
    kernels_.multiply[layer.gate_up.format](call);
    float gated[kGroup];
    for (std::int32_t r = 0; r < count; ++r) {
      kernels_.gate(call.out + r * call.out_stride, kGroup, decoder_.activation, gated);
      kernels_.prepare[layer.down.format](gated, kGroup, inner, std::int64_t{first_block} * kBlock / 2,
                                          inner_ + (first_row + r) * inner_bytes);
    }
  });
  add_product(thread,
              {.matrix = layer.down, .rows = inner_, .row_bytes = inner_bytes, .num_rows = tokens, .least_blocks = kLeastBlocks},
              layer.after_mlp_norm);
}

void DecoderRun::make_logits(Thread& thread) {
  if (step_.num_sampled == 0) return;
  const std::byte* rows = make_rows(thread, decoder_.head, step_.num_sampled, [&](std::int32_t i, float* line) {
    kernels_.rms_norm(hidden_of(step_.sampled[i]), decoder_.norm, decoder_.hidden, decoder_.eps, line);
    return line;
  });
  const Product product{.matrix = decoder_.head,
                        .rows = rows,
                        .row_bytes = kernels_.row_bytes[decoder_.head.format](padded(decoder_.head.inputs)),
                        .num_rows = step_.num_sampled,
                        .least_blocks = kLeastBlocks};
  multiply_into(thread, product, step_.logits, step_.logits_stride);
  if (decoder_.softcap == 0.0F) return;
  share(thread, step_.num_sampled, 1, [&](std::int32_t i, std::int32_t) {
    kernels_.softcap(decoder_.softcap, decoder_.head.outputs, step_.logits + i * step_.logits_stride);
  });
}

}  // namespace chairlift
