// All layers in one call, of an encoder built as BERT's or of layers with rotary positions: threads are started once, and
// what lies between the layers costs nothing.
//
// Threads wait for each other only around attention, which reads the rows of others. Between two attentions a thread
// takes a block of rows, and computes all products of these: what follows the first attention, and the queries, keys
// and values for the second. So the block stays in its second-level cache; then it takes another. With few rows reading
// the weights takes long, so all threads together compute one product after the other. Either way a row's numbers are the same to the last
// bit as those of single calls.

#include <cstring>
#include <type_traits>
#include <vector>

#include <omp.h>

#include "elementwise.h"
#include "linear.h"
#include "team.h"

namespace maxsimd {

// With fewer rows than this for each thread, all threads together compute one product after the other.
constexpr int64_t OWN_ROWS = 12;

// A product as the caller's table has it, number by number.
struct Product {
    int64_t weights, units, scales, sums, bias, inputs, columns;

    Stretch stretch() const { return {(const Unit*)weights, round_up(columns, PANEL) / LANES, units, units}; }
};

// A layer, likewise.
struct Layer {
    Product query, key, value, attended, widened, narrowed;
    int64_t attended_weight, attended_bias, narrowed_weight, narrowed_bias;  // of the norms
};

struct Epsilons {
    float attended, narrowed;
};

// Rows in memory, `stride` values apart.
template <class Value>
struct Matrix {
    Value* at;
    int64_t stride;

    Value* row(int64_t index) const { return at + index * stride; }
    Matrix from(int64_t index) const { return {row(index), stride}; }

    void copy(int64_t to, const Matrix& other, int64_t index, int64_t columns) const {
        std::memcpy(row(to), other.row(index), columns * sizeof(Value));
    }
};

// Memory that is divided among matrices. Each starts at a cache line, and its rows are apart, since products read some
// units of many rows at a time.
template <class Value>
class Workspace {
  public:
    // It begins at `start`, which may be null.
    Workspace(Value* start, int64_t rows) : start_(start), rows_(rows) {}

    // A row for each of the step.
    Matrix<Value> take(int64_t columns) {
        constexpr int64_t per_unit = sizeof(Unit) / sizeof(Value);
        const int64_t stride = columns % per_unit ? columns : apart(columns / per_unit) * per_unit;
        Value* from = start_ ? start_ + taken_ : nullptr;
        taken_ += round_up(rows_ * stride, 64);
        return {from, stride};
    }

    // The step's rows: in `rows`, if they are apart there, else in room for a copy.
    Matrix<Value> take_apart(Value* rows, int64_t columns) {
        constexpr int64_t per_unit = sizeof(Unit) / sizeof(Value);
        return are_apart(columns / per_unit) ? Matrix<Value>{rows, columns} : take(columns);
    }

    int64_t taken() const { return taken_; }  // values

  private:
    Value* const start_;
    const int64_t rows_;
    int64_t taken_ = 0;
};

// Rows of a step between products.
template <class Value>
struct Buffers {
    Matrix<Value> hidden, query, key, value, attended, summed, wide, residual;

    // Returns how many values they take, from `start` on, which may be null.
    int64_t divide(Value* start, Value* rows_of_step, int64_t rows, const Layer& layer) {
        Workspace<Value> space(start, rows);
        const auto take = [&](int64_t columns) { return space.take(columns); };
        hidden = space.take_apart(rows_of_step, layer.attended.columns);
        query = take(layer.query.columns);
        key = take(layer.key.columns);
        value = take(layer.value.columns);
        attended = take(layer.attended.inputs);
        summed = take(layer.attended.columns);
        wide = take(layer.widened.columns);
        residual = take(layer.attended.columns);
        return space.taken();
    }
};

// A step: its layers, its rows, which are replaced by what each layer makes of them, and its sequences. With `firsts`
// the last layer gives the first row of each sequence alone, and writes it there; `one_query` then has the sequences
// with one query in each.
template <class Value>
struct Step {
    const Layer* layers;
    const Epsilons* epsilons;
    int64_t layer_count, heads;
    float scale;
    Matrix<Value> hidden;
    int64_t rows;
    const int64_t *sequences, *one_query;
    int64_t count;
    Buffers<Value> at;
    Value* firsts;
};

// Rows that a thread computes alone, or that all threads compute together. What lies between two of their products, and
// is not needed afterwards, is written from the row `scratch` of its buffer on.
struct Block {
    int64_t first, count, scratch;
    bool alone;
};

// The parts of a layer that a thread computes, alone or with others.
template <class Number>
class Worker {
  public:
    using Value = typename Number::Value;
    // Attention has no weights that could be int8.
    using Attended = std::conditional_t<std::is_same_v<Number, Int8>, BFloat16, Number>;

  protected:
    // Calls `work` with blocks of the rows, one after the other, each in one thread, or once in all threads.
    template <class Work>
    static void in_blocks(int64_t rows, const Work& work) {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const BlockSizes sizes = block_sizes<Number>();
        if (rows < OWN_ROWS * threads || rows <= sizes.most_together()) {
            work(Block{0, rows, 0, false});
            return;
        }
        const int64_t blocks = round_up((rows + sizes.most - 1) / sizes.most, threads);
        const int64_t each = round_up((rows + blocks - 1) / blocks, sizes.whole);
#pragma omp for schedule(dynamic) nowait
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = sizes.start(rows, block, blocks), stop = sizes.start(rows, block + 1, blocks);
            // With twice as many blocks as threads, or more, each thread's scratch rows are its own.
            work(Block{first, stop - first, blocks == threads ? first : thread * each, true});
        }
    }

    // Work on a product's result: an activation, rows that are added, or a norm.
    struct After {
        Activation activation = Activation::NONE;
        Matrix<Value> added = {};
        Norm<Value> norm = {};
    };

    // The block's rows of a product, `x` and `out` being the block's. The weights `next` are multiplied afterwards.
    static void multiply(const Product& product, const Stretch& next, const Block& block, const Matrix<Value>& x,
                         const Matrix<Value>& out, const After& after = {}) {
        const Linear<Number> linear{x.at,
                                    x.stride,
                                    block.count,
                                    product.inputs,
                                    (const Unit*)product.weights,
                                    product.units,
                                    (const float*)product.scales,
                                    (const int32_t*)product.sums,
                                    (const float*)product.bias,
                                    product.columns,
                                    after.activation,
                                    out.at,
                                    next,
                                    after.added.at,
                                    after.added.stride,
                                    out.stride};
        if (block.alone)
            run_rows<Number>(linear, after.norm);
        else
            run_in_team<Number>(linear, after.norm);
    }

    // Copies the rows of a step, if they lie elsewhere.
    static void move_rows(const Matrix<Value>& to, const Matrix<Value>& from, int64_t rows, int64_t columns) {
        if (to.at == from.at) return;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) to.copy(row, from, row, columns);
    }

    // Calls `work` with each row of a block that this thread has to compute.
    template <class Work>
    static void each_row(const Block& block, const Work& work) {
        if (block.alone) {
            for (int64_t row = 0; row < block.count; row++) work(row);
            return;
        }
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < block.count; row++) work(row);
    }

    static void wait_for_others(const Block& block) {
        if (!block.alone) wait();
    }

    static void wait() {
#pragma omp barrier
    }
};

// A thread that runs layers built as BERT's.
template <class Number>
class Thread : Worker<Number> {
    using Worker<Number>::in_blocks, Worker<Number>::move_rows, Worker<Number>::multiply;
    using Worker<Number>::wait, Worker<Number>::wait_for_others;

  public:
    using typename Worker<Number>::Attended, typename Worker<Number>::Value;

    explicit Thread(const Step<Value>& step) : step_(step), at_(step.at) {}

    void run() {
        const Layer *layer = step_.layers, *last = layer + step_.layer_count - 1;
        move_rows(at_.hidden, step_.hidden, step_.rows, hidden_size());
        in_blocks(step_.rows, [&](const Block& block) { prepare(layer, block); });
        for (; layer < last; layer++) {
            attend(*layer, step_.sequences);
            in_blocks(step_.rows, [&](const Block& block) {
                const auto rows = at_.hidden.from(block.first);
                complete(*layer, first_product(layer + 1).stretch(), block, at_.attended.from(block.first), rows, rows);
                prepare(layer + 1, block);
            });
        }
        if (step_.firsts) {
            complete_firsts(*last);
            return;
        }
        attend(*last, step_.sequences);
        in_blocks(step_.rows, [&](const Block& block) {
            complete(*last, {}, block, at_.attended.from(block.first), at_.hidden.from(block.first),
                     step_.hidden.from(block.first));
        });
    }

  private:
    int64_t hidden_size() const { return step_.layers->attended.columns; }
    const Epsilons& epsilons(const Layer& layer) const { return step_.epsilons[&layer - step_.layers]; }

    // Whether only first rows come out of a layer.
    bool gives_firsts(const Layer* layer) const {
        return step_.firsts && layer == step_.layers + step_.layer_count - 1;
    }
    const Product& first_product(const Layer* layer) const { return gives_firsts(layer) ? layer->key : layer->query; }

    // The queries, keys and values that a layer makes of its input; where only first rows come out of it, without
    // the queries, which come later.
    void prepare(const Layer* layer, const Block& block) {
        const auto input = at_.hidden.from(block.first);
        const Product& next = gives_firsts(layer) ? layer->query : layer->attended;
        if (!gives_firsts(layer))
            multiply(layer->query, layer->key.stretch(), block, input, at_.query.from(block.first));
        multiply(layer->key, layer->value.stretch(), block, input, at_.key.from(block.first));
        multiply(layer->value, next.stretch(), block, input, at_.value.from(block.first));
    }

    void attend(const Layer& layer, const int64_t* sequences) {
        wait();
        attend_in_team<Attended>({at_.query.at, at_.key.at, at_.value.at, at_.query.stride, step_.heads, step_.heads,
                                  layer.query.columns / step_.heads, step_.scale, at_.attended.at, at_.attended.stride},
                                 sequences, step_.count);
        wait();
    }

    // The layer from attention's output on, with the block's rows of each operand. `out` may be the residual. The
    // weights `after` are multiplied afterwards.
    void complete(const Layer& layer, const Stretch& after, const Block& block, const Matrix<Value>& attended,
                  const Matrix<Value>& residual, const Matrix<Value>& out) {
        const auto summed = at_.summed.from(block.scratch), wide = at_.wide.from(block.scratch);
        multiply(layer.attended, layer.widened.stretch(), block, attended, summed,
                 {Activation::NONE,
                  {},
                  {residual.at, residual.stride, (const float*)layer.attended_weight, (const float*)layer.attended_bias,
                   epsilons(layer).attended}});
        wait_for_others(block);
        multiply(layer.widened, layer.narrowed.stretch(), block, summed, wide, {Activation::GELU});
        wait_for_others(block);
        multiply(layer.narrowed, after, block, wide, out,
                 {Activation::NONE,
                  {},
                  {summed.at, summed.stride, (const float*)layer.narrowed_weight, (const float*)layer.narrowed_bias,
                   epsilons(layer).narrowed}});
        wait_for_others(block);
    }

    // The last layer, from its queries on, for the first row of each sequence.
    void complete_firsts(const Layer& layer) {
        const int64_t attended = layer.query.columns, count = step_.count;
        wait();
        // Queries are computed side by side, and read where their sequences begin.
        share(count, [&](int64_t i, int64_t row) { at_.residual.copy(i, at_.hidden, row, hidden_size()); });
        wait();
        in_blocks(count, [&](const Block& block) {
            multiply(layer.query, layer.attended.stretch(), block, at_.residual.from(block.first),
                     at_.attended.from(block.first));
        });
        wait();
        share(count, [&](int64_t i, int64_t row) { at_.query.copy(row, at_.attended, i, attended); });
        attend(layer, step_.one_query);
        // What is attended lies where sequences begin; the queries are not needed any more.
        share(count, [&](int64_t i, int64_t row) { at_.query.copy(i, at_.attended, row, attended); });
        wait();
        in_blocks(count, [&](const Block& block) {
            complete(layer, {}, block, at_.query.from(block.first), at_.residual.from(block.first),
                     Matrix<Value>{step_.firsts, hidden_size()}.from(block.first));
        });
    }

    // Calls `work` for this thread's share of the sequences, with the first row of each.
    template <class Work>
    void share(int64_t count, const Work& work) {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; i++)
            work(i, step_.sequences[4 * i]);
    }

    const Step<Value>& step_;
    const Buffers<Value> at_;
};

// A norm of a layer with rotary positions; none if it has no weight.
struct LayerNorm {
    int64_t weight, bias, centered;
};

// A layer with rotary positions as the caller's table has it: norms stand before the parts, on both sides of them, or,
// as layer norms, after the sums. Norms of heads may be null.
struct RotaryLayer {
    Product qkv, out, wide, down;
    int64_t activation;
    LayerNorm before_attention, before_feed_forward, after_attention, after_feed_forward;
    int64_t query_norm, key_norm, window;

    bool is_normed_before() const { return before_feed_forward.weight; }
    bool is_normed_after() const { return after_feed_forward.weight; }
};

struct RotaryEpsilons {
    float before_attention, before_feed_forward, after_attention, after_feed_forward, heads;
};

// Rows of a step between products of these layers.
template <class Value>
struct RotaryBuffers {
    Matrix<Value> hidden, qkv, attended, summed, normed, wide;

    // Returns how many values they take, from `start` on, which may be null.
    int64_t divide(Value* start, Value* rows_of_step, int64_t rows, const RotaryLayer& layer) {
        Workspace<Value> space(start, rows);
        const auto take = [&](int64_t columns) { return space.take(columns); };
        hidden = space.take_apart(rows_of_step, layer.out.columns);
        qkv = take(layer.qkv.columns);
        attended = take(layer.out.inputs);
        summed = take(layer.out.columns);
        normed = take(layer.out.columns);
        wide = take(layer.down.inputs);
        return space.taken();
    }
};

// A step: its layers with the addresses of cosines and sines [rows][head_dim] for each, its rows, which are replaced, and
// its sequences.
template <class Value>
struct RotaryStep {
    const RotaryLayer* layers;
    const RotaryEpsilons* epsilons;
    const int64_t (*angles)[2];
    int64_t layer_count, heads, key_heads, head_dim;
    float scale;
    bool causal;
    Matrix<Value> hidden;
    int64_t rows;
    const int64_t* sequences;
    int64_t count;
    RotaryBuffers<Value> at;
};

// A thread that runs layers with rotary positions.
template <class Number>
class RotaryThread : Worker<Number> {
    using Worker<Number>::each_row, Worker<Number>::in_blocks, Worker<Number>::move_rows, Worker<Number>::multiply;
    using Worker<Number>::wait, Worker<Number>::wait_for_others;

  public:
    using typename Worker<Number>::Attended, typename Worker<Number>::Value;

    explicit RotaryThread(const RotaryStep<Value>& step)
        : step_(step), at_(step.at), size_(step.layers->out.columns), sums_(round_up(size_, LANES)) {}

    void run() {
        const RotaryLayer *layer = step_.layers, *stop = layer + step_.layer_count;
        move_rows(at_.hidden, step_.hidden, step_.rows, size_);
        in_blocks(step_.rows, [&](const Block& block) { prepare(layer, block); });
        for (; layer < stop; layer++) {
            wait();
            const Value* qkv = at_.qkv.at;
            const int64_t own = step_.heads * step_.head_dim, keys = step_.key_heads * step_.head_dim;
            attend_in_team<Attended>(
                {qkv, qkv + own, qkv + own + keys, at_.qkv.stride, step_.heads, step_.key_heads, step_.head_dim,
                 step_.scale, at_.attended.at, at_.attended.stride, step_.causal, layer->window},
                step_.sequences, step_.count);
            wait();
            in_blocks(step_.rows, [&](const Block& block) {
                if (layer + 1 == stop) {
                    complete(layer, {}, block, step_.hidden.from(block.first));
                    return;
                }
                complete(layer, layer[1].qkv.stretch(), block, at_.hidden.from(block.first));
                prepare(layer + 1, block);
            });
        }
    }

  private:
    const RotaryEpsilons& epsilons(const RotaryLayer* layer) const { return step_.epsilons[layer - step_.layers]; }

    // The queries, keys and values that a layer makes of its input.
    void prepare(const RotaryLayer* layer, const Block& block) {
        auto input = at_.hidden.from(block.first);
        if (layer->before_attention.weight) {
            const auto normed = at_.normed.from(block.scratch);
            normalise_rows(layer->before_attention, epsilons(layer).before_attention, block, input, normed);
            input = normed;
        }
        const auto qkv = at_.qkv.from(block.first);
        multiply(layer->qkv, layer->out.stretch(), block, input, qkv);
        wait_for_others(block);
        const int64_t* angles = step_.angles[layer - step_.layers];
        const int64_t first = block.first * step_.head_dim;
        const Rotation<Value> rotation{qkv.at,
                                       qkv.stride,
                                       block.count,
                                       step_.heads,
                                       step_.heads + step_.key_heads,
                                       step_.head_dim,
                                       (const Value*)angles[0] + first,
                                       (const Value*)angles[1] + first,
                                       (const float*)layer->query_norm,
                                       (const float*)layer->key_norm,
                                       epsilons(layer).heads};
        each_row(block, [&](int64_t row) {
            for (int64_t head = 0; head < rotation.heads; head++) turn(rotation, row, head);
        });
    }

    // The layer from attention's output on, into the block's rows `out`. The weights `next` are multiplied afterwards.
    void complete(const RotaryLayer* layer, const Stretch& next, const Block& block, const Matrix<Value>& out) {
        const auto hidden = at_.hidden.from(block.first), attended = at_.attended.from(block.first);
        const auto summed = at_.summed.from(block.scratch), normed = at_.normed.from(block.scratch);
        const auto wide = at_.wide.from(block.scratch);
        multiply_and_add(layer->out, layer->wide.stretch(), block, attended, hidden, layer, layer->after_attention,
                         epsilons(layer).after_attention, normed, summed);
        auto input = summed;
        if (layer->is_normed_before()) {
            normalise_rows(layer->before_feed_forward, epsilons(layer).before_feed_forward, block, summed, normed);
            input = normed;
        }
        multiply(layer->wide, layer->down.stretch(), block, input, wide, {(Activation)layer->activation});
        wait_for_others(block);
        multiply_and_add(layer->down, next, block, wide, summed, layer, layer->after_feed_forward,
                         epsilons(layer).after_feed_forward, normed, out);
    }

    // The sum of a product, with its norm, and the residual; or the norm of their sum. `normed` is scratch memory.
    void multiply_and_add(const Product& product, const Stretch& next, const Block& block, const Matrix<Value>& x,
                          const Matrix<Value>& residual, const RotaryLayer* layer, const LayerNorm& norm, float epsilon,
                          const Matrix<Value>& normed, const Matrix<Value>& out) {
        if (!layer->is_normed_before()) {
            multiply(product, next, block, x, out,
                     {Activation::NONE,
                      {},
                      {residual.at, residual.stride, (const float*)norm.weight, (const float*)norm.bias, epsilon}});
        } else if (!layer->is_normed_after()) {
            multiply(product, next, block, x, out, {Activation::NONE, residual});
        } else {
            multiply(product, next, block, x, normed);
            wait_for_others(block);
            normalise_rows(norm, epsilon, block, normed, normed);
            each_row(block, [&](int64_t row) { add(normed.row(row), residual.row(row), out.row(row)); });
        }
        wait_for_others(block);
    }

    void add(const Value* x, const Value* y, Value* out) const {
        for (int64_t i = 0; i < size_; i += LANES) {
            const __mmask16 mask = first_lanes(size_ - i);
            store(out + i, mask, _mm512_add_ps(load(x + i, mask), load(y + i, mask)));
        }
    }

    void normalise_rows(const LayerNorm& norm, float epsilon, const Block& block, const Matrix<Value>& x,
                        const Matrix<Value>& out) {
        const RowNorm<Value> rows{x.at,
                                  nullptr,
                                  x.stride,
                                  0,
                                  block.count,
                                  size_,
                                  (const float*)norm.weight,
                                  (const float*)norm.bias,
                                  epsilon,
                                  norm.centered != 0,
                                  out.at,
                                  out.stride};
        each_row(block, [&](int64_t row) { norm_row(rows, row, sums_.data()); });
        wait_for_others(block);
    }

    const RotaryStep<Value>& step_;
    const RotaryBuffers<Value> at_;
    const int64_t size_;  // of a hidden state
    std::vector<float> sums_;
};

// How many values the buffers of a step take, at most: the distances of rows depend on the size of a value.
template <template <class> class Of, class AnyLayer>
int64_t most_workspace(int64_t rows, const AnyLayer& layer) {
    return std::max(Of<float>().divide(nullptr, nullptr, rows, layer),
                    Of<uint16_t>().divide(nullptr, nullptr, rows, layer));
}

}  // namespace maxsimd

#pragma GCC visibility push(default)
extern "C" {

// How many values the workspace of `maxsimd_layers` must have for steps of up to `rows` rows.
int64_t maxsimd_layers_workspace(const void* layers, int64_t rows) {
    return maxsimd::most_workspace<maxsimd::Buffers>(rows, *(const maxsimd::Layer*)layers);
}

// Runs all layers on hidden [rows][columns], in place, in numbers of a kind as `maxsimd_linear` counts them. `layers`
// is [layer_count][46]: of the products for queries, keys and values, after attention, and the two of the feed-forward
// the addresses of weights, the units of a column, the addresses of scales, sums and bias, the inputs and the columns;
// then the addresses of weight and bias of either norm. All layers have the same sizes. `epsilons` is [layer_count][2].
// `sequences` is [count][4] as `maxsimd_attention` has it; together the sequences have all rows. With `firsts`
// [count][columns], what the last layer makes of the first row of each sequence is written there, and `hidden` holds
// nothing of use afterwards. The workspace starts at a cache line.
void maxsimd_layers(int kind, const void* layers, const void* epsilons, int64_t layer_count, int64_t heads, float scale,
                    void* hidden, int64_t rows, const int64_t* sequences, int64_t count, void* workspace,
                    void* firsts) {
    using namespace maxsimd;
    const auto compute = [&](auto number) {
        using Value = typename decltype(number)::Value;
        Buffers<Value> buffers;
        buffers.divide((Value*)workspace, (Value*)hidden, rows, *(const Layer*)layers);
        std::vector<int64_t> one_query(sequences, sequences + 4 * count);
        for (int64_t i = 0; i < count; i++) one_query[4 * i + 1] = 1;
        const Step<Value> step{(const Layer*)layers,
                               (const Epsilons*)epsilons,
                               layer_count,
                               heads,
                               scale,
                               {(Value*)hidden, ((const Layer*)layers)->attended.columns},
                               rows,
                               sequences,
                               one_query.data(),
                               count,
                               buffers,
                               (Value*)firsts};
#pragma omp parallel
        Thread<decltype(number)>(step).run();
    };
    by_kind<Float32, BFloat16, Int8>(kind, compute);
}

// How many values the workspace of `maxsimd_rotary_layers` must have for steps of up to `rows` rows.
int64_t maxsimd_rotary_layers_workspace(const void* layers, int64_t rows) {
    return maxsimd::most_workspace<maxsimd::RotaryBuffers>(rows, *(const maxsimd::RotaryLayer*)layers);
}

// As above, for layers with rotary positions. `layers` is [layer_count][44]: four products as above, of queries, keys and
// values together, after attention, and the two of the feed-forward; the activation of the first of these; of the norms
// before attention and feed-forward, then of those after them, the addresses of weight and bias, and whether they are
// centered; the addresses of the norms of queries and keys; the window. `epsilons` is [layer_count][5], `angles`
// [layer_count][2]: the addresses of cosines and sines [rows][head_dim], in numbers of hidden's kind.
void maxsimd_rotary_layers(int kind, const void* layers, const void* epsilons, const void* angles, int64_t layer_count,
                           int64_t heads, int64_t key_heads, int64_t head_dim, float scale, int causal, void* hidden,
                           int64_t rows, const int64_t* sequences, int64_t count, void* workspace) {
    using namespace maxsimd;
    const auto compute = [&](auto number) {
        using Value = typename decltype(number)::Value;
        RotaryBuffers<Value> buffers;
        buffers.divide((Value*)workspace, (Value*)hidden, rows, *(const RotaryLayer*)layers);
        const RotaryStep<Value> step{(const RotaryLayer*)layers,
                                     (const RotaryEpsilons*)epsilons,
                                     (const int64_t (*)[2])angles,
                                     layer_count,
                                     heads,
                                     key_heads,
                                     head_dim,
                                     scale,
                                     causal != 0,
                                     {(Value*)hidden, ((const RotaryLayer*)layers)->out.columns},
                                     rows,
                                     sequences,
                                     count,
                                     buffers};
#pragma omp parallel
        RotaryThread<decltype(number)>(step).run();
    };
    by_kind<Float32, BFloat16, Int8>(kind, compute);
}
}
#pragma GCC visibility pop
