// All layers of an encoder built as BERT's, for a step of few rows, in one call: threads are started once, and what
// lies between the layers costs nothing.
//
// Where there are rows enough for each thread, a thread computes its own rows through all products of a layer, and
// threads wait for each other only around attention, which reads the rows of others. With fewer rows the threads divide
// the columns of each product. Either way a row's numbers are the same to the last bit as those of single calls.

#include <cstring>
#include <type_traits>
#include <vector>

#include <omp.h>

#include "linear.h"
#include "team.h"

namespace maxsimd {

// With this number of rows for each thread, or more, a thread has rows of its own: all threads then read all weights,
// each a product ahead of its multiplications.
constexpr int64_t OWN_ROWS = 12;

// A product as the caller's table has it, number by number.
struct Product {
    int64_t weights, units, scales, sums, bias, inputs, columns;

    Stretch stretch() const { return {(const Unit*)weights, round_up(columns, PANEL) / LANES * units}; }
};

// A layer, likewise.
struct Layer {
    Product query, key, value, attended, widened, narrowed;
    int64_t attended_weight, attended_bias, narrowed_weight, narrowed_bias;  // of the norms
};

struct Epsilons {
    float attended, narrowed;
};

// Rows of a step between products: one buffer for each, of which all start at a cache line.
template <class Value>
struct Buffers {
    Value *query, *key, *value, *attended, *summed, *wide, *residual;

    // Returns how many values they take, from `start` on, which may be null.
    int64_t divide(Value* start, int64_t rows, const Layer& layer) {
        int64_t taken = 0;
        const auto take = [&](int64_t columns) {
            Value* from = start ? start + taken : nullptr;
            taken += round_up(rows * columns, 64);
            return from;
        };
        query = take(layer.query.columns);
        key = take(layer.key.columns);
        value = take(layer.value.columns);
        attended = take(layer.attended.inputs);
        summed = take(layer.attended.columns);
        wide = take(layer.widened.columns);
        residual = take(layer.attended.columns);
        return taken;
    }
};

// What each thread of a team does.
template <class Number>
class Thread {
  public:
    using Value = typename Number::Value;
    // Attention has no weights that could be int8.
    using Attended = std::conditional_t<std::is_same_v<Number, Int8>, BFloat16, Number>;

    Thread(const Buffers<Value>& buffers, const int64_t* sequences, int64_t count, int64_t heads, float scale)
        : at_(buffers), sequences_(sequences), count_(count), heads_(heads), scale_(scale) {}

    // Replaces `hidden` [rows], a layer's input, by its output. With `firsts`, that output is written for the first row
    // of each sequence alone, to `firsts` [count]; `sequences` then has one query in each. The weights `after` are
    // multiplied afterwards.
    void run(const Layer& layer, const Epsilons& epsilons, const Stretch& after, Value* hidden, int64_t rows,
             Value* firsts) {
        share(rows);
        multiply(layer.query, layer.key.stretch(), hidden, rows, at_.query);
        multiply(layer.key, layer.value.stretch(), hidden, rows, at_.key);
        multiply(layer.value, layer.attended.stretch(), hidden, rows, at_.value);
        wait();
        attend_in_team<Attended>(
            {at_.query, at_.key, at_.value, heads_, layer.query.columns / heads_, scale_, at_.attended}, sequences_,
            count_);
        wait();
        if (firsts) {
            rows = count_;
            share(rows);
            gather(hidden, layer);
            feed_forward(layer, epsilons, after, at_.query, at_.residual, rows, firsts);
        } else {
            feed_forward(layer, epsilons, after, at_.attended, hidden, rows, hidden);
        }
    }

  private:
    // Which of the rows are the calling thread's, if each has its own.
    void share(int64_t rows) {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        owns_ = rows >= OWN_ROWS * threads;
        first_ = rows * thread / threads;
        own_ = rows * (thread + 1) / threads - first_;
    }

    // What follows attention. `out` may be the residual.
    void feed_forward(const Layer& layer, const Epsilons& epsilons, const Stretch& after, const Value* attended,
                      const Value* residual, int64_t rows, Value* out) {
        multiply(layer.attended, layer.widened.stretch(), attended, rows, at_.summed, false,
                 {residual, layer.attended.columns, (const float*)layer.attended_weight,
                  (const float*)layer.attended_bias, epsilons.attended});
        wait_for_all();
        multiply(layer.widened, layer.narrowed.stretch(), at_.summed, rows, at_.wide, true);
        wait_for_all();
        multiply(layer.narrowed, after, at_.wide, rows, out, false,
                 {at_.summed, layer.narrowed.columns, (const float*)layer.narrowed_weight,
                  (const float*)layer.narrowed_bias, epsilons.narrowed});
        wait_for_all();
    }

    // Copies the first row of each sequence to where the rows of all are not needed any more.
    void gather(const Value* hidden, const Layer& layer) {
        const int64_t wide = layer.attended.inputs, columns = layer.attended.columns;
        for (int64_t i = first_; i < first_ + own_; i++) {
            const int64_t row = sequences_[4 * i];
            std::memcpy(at_.query + i * wide, at_.attended + row * wide, wide * sizeof(Value));
            std::memcpy(at_.residual + i * columns, hidden + row * columns, columns * sizeof(Value));
        }
        wait_for_all();
    }

    // The weights `after` are multiplied afterwards.
    void multiply(const Product& product, const Stretch& after, const Value* x, int64_t rows, Value* out,
                  bool gelu = false, const Norm<Value>& norm = {}) {
        const Linear<Number> linear{x,
                                    product.inputs,
                                    rows,
                                    product.inputs,
                                    (const Unit*)product.weights,
                                    product.units,
                                    (const float*)product.scales,
                                    (const int32_t*)product.sums,
                                    (const float*)product.bias,
                                    product.columns,
                                    gelu,
                                    out,
                                    after};
        if (owns_)
            run_rows<Number>(linear, norm, first_, own_);
        else
            run_in_team<Number>(linear, norm);
    }

    // A thread that has rows of its own goes on with these.
    void wait_for_all() {
        if (!owns_) wait();
    }

    static void wait() {
#pragma omp barrier
    }

    const Buffers<Value> at_;
    const int64_t *sequences_, count_, heads_;
    const float scale_;
    bool owns_ = false;
    int64_t first_ = 0, own_ = 0;
};

template <class Number>
void run_layers(const Layer* layers, const Epsilons* epsilons, int64_t layer_count, int64_t heads, float scale,
                typename Number::Value* hidden, int64_t rows, const int64_t* sequences, int64_t count,
                typename Number::Value* workspace, typename Number::Value* firsts) {
    Buffers<typename Number::Value> buffers;
    buffers.divide(workspace, rows, layers[0]);
    std::vector<int64_t> one_query(sequences, sequences + 4 * count);
    for (int64_t i = 0; i < count; i++) one_query[4 * i + 1] = 1;
#pragma omp parallel
    {
        Thread<Number> whole(buffers, sequences, count, heads, scale);
        for (int64_t layer = 0; layer + 1 < layer_count; layer++)
            whole.run(layers[layer], epsilons[layer], layers[layer + 1].query.stretch(), hidden, rows, nullptr);
        Thread<Number> last(buffers, firsts ? one_query.data() : sequences, count, heads, scale);
        last.run(layers[layer_count - 1], epsilons[layer_count - 1], {}, hidden, rows, firsts);
    }
}

}  // namespace maxsimd

#pragma GCC visibility push(default)
extern "C" {

// How many values the workspace of `maxsimd_layers` must have for steps of up to `rows` rows.
int64_t maxsimd_layers_workspace(const void* layers, int64_t rows) {
    maxsimd::Buffers<uint16_t> buffers;
    return buffers.divide(nullptr, rows, *(const maxsimd::Layer*)layers);
}

// Runs all layers on hidden [rows][columns], in place, in numbers of a kind as `maxsimd_linear` counts them. `layers`
// is [layer_count][46]: of the products for queries, keys and values, after attention, and the two of the feed-forward
// the addresses of weights, the units of a column, the addresses of scales, sums and bias, the inputs and the columns;
// then the addresses of weight and bias of either norm. All layers have the same sizes. `epsilons` is [layer_count][2].
// `sequences` is [count][4] as `maxsimd_attention` has it; together the sequences have all rows. With `firsts`
// [count][columns], what the last layer makes of the first row of each sequence is written there, and `hidden` is left
// with its input. The workspace starts at a cache line.
void maxsimd_layers(int kind, const void* layers, const void* epsilons, int64_t layer_count, int64_t heads, float scale,
                    void* hidden, int64_t rows, const int64_t* sequences, int64_t count, void* workspace,
                    void* firsts) {
    using namespace maxsimd;
    const auto compute = [&](auto number) {
        using Value = typename decltype(number)::Value;
        run_layers<decltype(number)>((const Layer*)layers, (const Epsilons*)epsilons, layer_count, heads, scale,
                                     (Value*)hidden, rows, sequences, count, (Value*)workspace, (Value*)firsts);
    };
    if (kind == 0)
        compute(Float32{});
    else if (kind == 1)
        compute(BFloat16{});
    else
        compute(Int8{});
}
}
#pragma GCC visibility pop
