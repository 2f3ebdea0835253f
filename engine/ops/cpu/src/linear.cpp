// Linear layers with bias, followed by an activation, a gate, a sum, or a sum and its layer norm: float32 with weights in
// float32, or bfloat16 with weights in bfloat16 or int8.
//
// A task computes a block of rows for a range of columns, a panel of 32 columns at a time. A row's sums run over its
// inputs in order, so that its results are the same to the last bit whatever other rows there are.

#include <algorithm>
#include <vector>

#include <omp.h>

#include "amx.h"
#include "blocks.h"
#include "linear.h"
#include "rows.h"
#include "team.h"
#include "tile.h"

namespace maxsimd {

// Multiplies in vector registers.
template <class Number>
class Vectors {
  public:
    static constexpr int TILE_ROWS = 12;
    static constexpr BlockSizes SIZES{8 * TILE_ROWS, 1};
    static constexpr int64_t AT_ONCE = 192 << 10;  // bytes of weights
    static constexpr int64_t BETWEEN = 64;  // units that are multiplied between two prefetches

    Vectors(const Linear<Number>& linear, int64_t most)
        : linear_(linear), in_place_(is_in_place()), rows_(in_place_ ? 0 : most, linear.units()) {}

    void take(int64_t first, int64_t count) {
        first_ = first;
        count_ = count;
        if (in_place_) {
            at_ = (const Unit*)(linear_.x + first * linear_.x_stride);
            stride_ = linear_.x_stride / Number::PER_UNIT;
            return;
        }
        at_ = rows_.at(0);
        stride_ = rows_.stride();
        for (int64_t row = 0; row < count; row++) rows_.take(linear_, first + row, row);
    }

    // Computes all rows for the columns from `first` on: few rows and all of these columns at a time. The weights of
    // `next` are multiplied afterwards. Inlined, GCC would compile the inner loops several times, some of them worse.
    __attribute__((noinline)) void multiply_all(int64_t first, int64_t last, const Stretch& next) {
        // Tiles of nearly equal height, so that none is too low to keep the multipliers busy.
        const int64_t tiles = (count_ + TILE_ROWS - 1) / TILE_ROWS, panels = (last - first) / PANEL;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t row = count_ * tile / tiles, stop = count_ * (tile + 1) / tiles;
            for (int64_t column = first; column < last; column += PANEL) {
                const Ahead ahead(next, tile * panels + (column - first) / PANEL, tiles * panels);
                multiply_rows<TILE_ROWS>((int)(stop - row), row, column, ahead);
                finish(linear_, sums_, rows_.scales(row), stop - row, first_ + row, column);
            }
        }
    }

    void complete() {}

    // As many panels as `run_task` says, of a layer with so many units.
    int64_t panels_at_once(int64_t units) const { return whole_panels(AT_ONCE, units); }

  private:
    // Whether rows can be read without a copy: in whole units, and as a copy would lie.
    bool is_in_place() const {
        return !std::is_same_v<Number, Int8> && linear_.inputs % Number::PER_UNIT == 0 &&
               linear_.x_stride % Number::PER_UNIT == 0 && (uintptr_t)linear_.x % sizeof(Unit) == 0 &&
               are_apart(linear_.x_stride / Number::PER_UNIT);
    }

    template <int ROWS>
    void multiply_rows(int present, int64_t row, int64_t column, Ahead ahead) {
        if constexpr (ROWS > 1) {
            if (present < ROWS) {
                multiply_rows<ROWS - 1>(present, row, column, ahead);
                return;
            }
        }
        typename Number::Sum sums[ROWS][2];
        clear<Number, ROWS, 2>(sums);
        const int64_t units = linear_.units(), lines = ahead.lines() * BETWEEN / units + 1;
        for (int64_t unit = 0; unit < units; unit += BETWEEN) {
            ahead.fetch(lines);
            multiply<Number, ROWS, 2>(at_ + row * stride_ + unit, stride_, linear_.block(column) + unit * LANES,
                                      linear_.packed_units * LANES, std::min(BETWEEN, units - unit), sums);
        }
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
            for (int block = 0; block < 2; block++)
                _mm512_store_si512(sums_ + i * PANEL + block * LANES, (__m512i)sums[i][block]);
    }

    const Linear<Number>& linear_;
    const bool in_place_;
    Rows rows_;  // the copy
    const Unit* at_ = nullptr;
    int64_t stride_ = 0, first_ = 0, count_ = 0;
    alignas(64) Unit sums_[TILE_ROWS * PANEL];
};

// Rows and panels that a thread computes.
struct Task {
    int64_t first, count, begin, end;
};

// Computes a task. `Way` multiplies, by vectors or by tiles; each thread has its own.
//
// All rows are multiplied with the weights of some panels before the next, so that these stay in the second-level cache
// while they are used. There is room for as many beside them: with `fetches`, the next are prefetched meanwhile, at last
// those of `after`.
template <class Way, class Number>
void run_task(Way& way, const Linear<Number>& linear, const Task& task, bool fetches, const Stretch& after) {
    const int64_t at_once = way.panels_at_once(linear.units());
    way.take(task.first, task.count);
    for (int64_t panel = task.begin, stop; panel < task.end; panel = stop) {
        stop = std::min(panel + at_once, task.end);
        Stretch ahead = stop < task.end ? linear.stretch(stop, task.end) : after;
        ahead.blocks = fetches ? std::min(ahead.blocks, way.panels_at_once(ahead.units) * PANEL / LANES) : 0;
        way.multiply_all(panel * PANEL, stop * PANEL, ahead);
    }
    way.complete();
}

template <class Number>
void normalise_row(const Linear<Number>& linear, const Norm<typename Number::Value>& norm, int64_t row, float* sums) {
    normalise(linear.out + row * linear.out_stride, norm.residual + row * norm.residual_stride, norm, linear.columns,
              sums);
}

template <class Number>
void normalise_in_team(const Linear<Number>& linear, const Norm<typename Number::Value>& norm) {
    if (!norm.residual) return;
    std::vector<float> sums(round_up(linear.columns, LANES));
#pragma omp barrier
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < linear.rows; row++) normalise_row(linear, norm, row, sums.data());
}

// In tiles, few rows leave no time to fetch weights in.
template <class Way, class Number>
bool has_time_to_fetch(int64_t rows) {
    return std::is_same_v<Way, Vectors<Number>> || rows > 3 * Way::TILE_ROWS;
}

template <class Way, class Number>
void run_in_team_by(const Linear<Number>& linear, const Norm<typename Number::Value>& norm) {
    if (linear.rows == 0) return;
    const int64_t threads = omp_get_num_threads(), panels = (linear.columns + PANEL - 1) / PANEL;
    // With few rows reading the weights takes long: each thread reads a part of them, and computes its columns.
    if (linear.rows <= Way::SIZES.most_together() && (panels % threads == 0 || panels >= 8 * threads)) {
        const int64_t thread = omp_get_thread_num();
        const auto part = [&](int64_t whole, int64_t number) { return whole * number / threads; };
        const Stretch& next = linear.upcoming;
        const Stretch after = next.part(part(next.blocks, thread), part(next.blocks, thread + 1));
        Way way(linear, linear.rows);
        run_task(way, linear, {0, linear.rows, part(panels, thread), part(panels, thread + 1)},
                 has_time_to_fetch<Way, Number>(linear.rows), after);
        normalise_in_team(linear, norm);
        return;
    }
    // Blocks of rows of equal size, the same number for each thread.
    const int64_t tiles = (linear.rows + Way::TILE_ROWS - 1) / Way::TILE_ROWS;
    const int64_t most_blocks = (linear.rows + Way::SIZES.most - 1) / Way::SIZES.most;
    const int64_t blocks = std::min(tiles, round_up(most_blocks, 2 * threads));
    const int64_t splits = std::min(panels, (2 * threads + blocks - 1) / blocks);
    Way way(linear, round_up((linear.rows + blocks - 1) / blocks, Way::SIZES.whole));
#pragma omp for schedule(dynamic) nowait
    for (int64_t task = 0; task < blocks * splits; task++) {
        const int64_t block = task / splits, split = task % splits;
        const int64_t first = Way::SIZES.start(linear.rows, block, blocks);
        const int64_t stop = Way::SIZES.start(linear.rows, block + 1, blocks);
        const int64_t begin = panels * split / splits, end = panels * (split + 1) / splits;
        const bool fetches = stop - first > 3 * Way::TILE_ROWS;  // with fewer there is no time for it
        run_task(way, linear, {first, stop - first, begin, end}, fetches, linear.stretch(begin, end));
    }
    normalise_in_team(linear, norm);
}

template <class Way, class Number>
void run_rows_by(const Linear<Number>& linear, const Norm<typename Number::Value>& norm) {
    if (linear.rows == 0) return;
    {
        Way way(linear, linear.rows);
        run_task(way, linear, {0, linear.rows, 0, (linear.columns + PANEL - 1) / PANEL},
                 has_time_to_fetch<Way, Number>(linear.rows), linear.upcoming);
    }
    if (norm.residual) {
        std::vector<float> sums(round_up(linear.columns, LANES));
        for (int64_t row = 0; row < linear.rows; row++) normalise_row(linear, norm, row, sums.data());
    }
}

// Calls `work` with a null pointer to the `Way` in which this processor multiplies such numbers.
template <class Number, class Work>
auto by_way(const Work& work) {
#ifdef MAXSIMD_AMX
    if constexpr (!std::is_same_v<Number, Float32>)
        if (uses_amx()) return work((Tiles<Number>*)nullptr);
#endif
    return work((Vectors<Number>*)nullptr);
}

template <class Number>
void run_in_team(const Linear<Number>& linear, const Norm<typename Number::Value>& norm) {
    by_way<Number>([&](auto* way) { run_in_team_by<std::remove_pointer_t<decltype(way)>>(linear, norm); });
}

template <class Number>
void run_rows(const Linear<Number>& linear, const Norm<typename Number::Value>& norm) {
    by_way<Number>([&](auto* way) { run_rows_by<std::remove_pointer_t<decltype(way)>>(linear, norm); });
}

template <class Number>
BlockSizes block_sizes() {
    return by_way<Number>([](auto* way) { return way->SIZES; });
}

template void run_in_team(const Linear<Float32>&, const Norm<float>&);
template void run_in_team(const Linear<BFloat16>&, const Norm<uint16_t>&);
template void run_in_team(const Linear<Int8>&, const Norm<uint16_t>&);
template void run_rows(const Linear<Float32>&, const Norm<float>&);
template void run_rows(const Linear<BFloat16>&, const Norm<uint16_t>&);
template void run_rows(const Linear<Int8>&, const Norm<uint16_t>&);
template BlockSizes block_sizes<Float32>();
template BlockSizes block_sizes<BFloat16>();
template BlockSizes block_sizes<Int8>();

template <class Number>
void run(const Linear<Number>& linear, const Norm<typename Number::Value>& norm) {
#pragma omp parallel
    run_in_team(linear, norm);
}

// Multiplies and adds in registers alone. Returns the number of operations: a multiplication and an addition are two.
template <class Number>
double multiply_registers() {
    constexpr int64_t times = 20000;
#ifdef MAXSIMD_AMX
    if constexpr (!std::is_same_v<Number, Float32>)
        if (uses_amx()) {
            const TileRegisters registers;
            for (int64_t i = 0; i < times; i++) {
                Dot<Number>::template add<0, 4, 6>();
                Dot<Number>::template add<1, 4, 7>();
                Dot<Number>::template add<2, 5, 6>();
                Dot<Number>::template add<3, 5, 7>();
            }
            return 2.0 * times * 4 * HALF * HALF * LANES * Number::PER_UNIT;
        }
#endif
    typename Number::Sum sums[12][2];
    clear<Number, 12, 2>(sums);
    __m512i values = _mm512_setzero_si512();
    for (int64_t i = 0; i < times; i++) {
        asm volatile("" : "+v"(values));
#pragma GCC unroll 12
        for (auto& row : sums)
#pragma GCC unroll 2
            for (auto& sum : row) sum = Number::add(sum, values, values);
    }
    for (auto& row : sums)
        for (auto& sum : row) asm volatile("" ::"v"(sum));
    return 2.0 * times * 24 * LANES * Number::PER_UNIT;
}

// Operations a second of all threads together, at the best of five times.
template <class Number>
double product_peak() {
    double peak = 0;
#pragma omp parallel reduction(+ : peak)
    for (int turn = 0; turn < 5; turn++) {
#pragma omp barrier
        const double started = omp_get_wtime(), operations = multiply_registers<Number>();
        peak = std::max(peak, operations / (omp_get_wtime() - started));
    }
    return peak;
}

// A layer whose weights are in blocks: a thread takes `CHUNK` bytes of them out of their blocks, into memory of its own,
// and multiplies all rows with these. With fewer, rows would be read from memory too often.
constexpr int64_t CHUNK = 4 << 20;

template <class Way>
void run_from_blocks_by(const Linear<BFloat16>& linear, const Norm<uint16_t>& norm, const BlockRows& blocks) {
    const int64_t units = linear.packed_units, panels = (linear.columns + PANEL - 1) / PANEL;
    const int64_t most = std::max<int64_t>(1, CHUNK / (PANEL * units * (int64_t)sizeof(Unit)));
    const int64_t tasks = round_up((panels + most - 1) / most, omp_get_max_threads());
    const int64_t row_blocks = (linear.rows + Way::SIZES.most - 1) / Way::SIZES.most;
#pragma omp parallel
    {
        static thread_local std::vector<Unit> storage;  // kept, because new memory costs as much as small products
        storage.resize(std::max<size_t>(storage.size(), most * PANEL * units + LANES));
        Unit* const weights = (Unit*)round_up((int64_t)storage.data(), 64);
        Linear<BFloat16> part = linear;
        part.weights = weights;
        Way way(part, Way::SIZES.most);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t begin = panels * task / tasks, end = panels * (task + 1) / tasks, first = begin * PANEL;
            part.columns = std::min(end * PANEL, linear.columns) - first;
            part.bias = linear.bias ? linear.bias + first : nullptr;
            part.added = linear.added ? linear.added + first : nullptr;
            part.out = linear.out + (linear.activation > Activation::GELU ? first / 2 : first);
            for (int64_t column = 0; column < (end - begin) * PANEL; column += LANES)
                unpack_block(blocks, first + column, linear.columns, linear.inputs, weights + column * units);
            for (int64_t block = 0; block < row_blocks; block++) {
                const int64_t row = Way::SIZES.start(linear.rows, block, row_blocks);
                const int64_t stop = Way::SIZES.start(linear.rows, block + 1, row_blocks);
                run_task(way, part, {row, stop - row, 0, end - begin}, false, {});
            }
        }
        if (norm.residual) {
            std::vector<float> sums(round_up(linear.columns, LANES));
#pragma omp for schedule(static)
            for (int64_t row = 0; row < linear.rows; row++) normalise_row(linear, norm, row, sums.data());
        }
    }
}

void run_from_blocks(const Linear<BFloat16>& linear, const Norm<uint16_t>& norm, const BlockRows& blocks) {
#ifdef MAXSIMD_AMX
    if (uses_amx()) return run_from_blocks_by<Tiles<BFloat16>>(linear, norm, blocks);
#endif
    run_from_blocks_by<Vectors<BFloat16>>(linear, norm, blocks);
}

}  // namespace maxsimd

#pragma GCC visibility push(default)
extern "C" {

// Rows [count][units], end to end, packed into blocks of 16 columns: [ceil(count / 16)][units][16].
void maxsimd_pack(const void* rows, int64_t count, int64_t units, void* packed) {
    maxsimd::pack((const maxsimd::Unit*)rows, units, count, units, (maxsimd::Unit*)packed);
}

// x [rows][inputs] -> out [rows][columns], float32 if `kind` is 0, bfloat16 if it is 1 or, with int8 weights, 2.
// x_stride is in elements. Weights are packed and padded with zeros to `packed_units` a column, a multiple of 16, and
// to a multiple of 32 columns. `activation` is as `Activation` counts them; with gates, columns are a multiple of 32 and
// out has half of them. `added` [rows][columns], whose rows are added_stride apart, is added to the output. With a
// residual, likewise, out is the layer norm of the sum of the layer's output and the residual.
void maxsimd_linear(int kind, const void* x, int64_t x_stride, int64_t rows, int64_t inputs, const void* weights,
                    int64_t packed_units, const float* weight_scales, const int32_t* weight_sums, const float* bias,
                    int64_t columns, int activation, const void* added, int64_t added_stride, const void* residual,
                    int64_t residual_stride, const float* norm_weight, const float* norm_bias, float epsilon,
                    void* out) {
    using namespace maxsimd;
    const auto compute = [&](auto number) {
        using Number = decltype(number);
        using Value = typename Number::Value;
        run<Number>({(const Value*)x,
                     x_stride,
                     rows,
                     inputs,
                     (const Unit*)weights,
                     packed_units,
                     weight_scales,
                     weight_sums,
                     bias,
                     columns,
                     (Activation)activation,
                     (Value*)out,
                     {},
                     (const Value*)added,
                     added_stride},
                    {(const Value*)residual, residual_stride, norm_weight, norm_bias, epsilon});
    };
    by_kind<Float32, BFloat16, Int8>(kind, compute);
}

// As above, in bfloat16, with weights whose rows [columns][inputs] are in blocks of `kinds`, as blocks.h has them.
// `inputs` is a multiple of 32.
void maxsimd_linear_blocks(const void* x, int64_t x_stride, int64_t rows, int64_t inputs, const uint8_t* kinds,
                           const uint8_t* const* blocks, const float* bias, int64_t columns, int activation,
                           const void* added, int64_t added_stride, const void* residual, int64_t residual_stride,
                           const float* norm_weight, const float* norm_bias, float epsilon, void* out) {
    using namespace maxsimd;
    run_from_blocks({(const uint16_t*)x,
                     x_stride,
                     rows,
                     inputs,
                     nullptr,
                     inputs / BFloat16::PER_UNIT,
                     nullptr,
                     nullptr,
                     bias,
                     columns,
                     (Activation)activation,
                     (uint16_t*)out,
                     {},
                     (const uint16_t*)added,
                     added_stride},
                    {(const uint16_t*)residual, residual_stride, norm_weight, norm_bias, epsilon}, {kinds, blocks});
}

// Takes rows [count][inputs] out of their blocks. `inputs` is a multiple of 32.
void maxsimd_unpack(const uint8_t* kinds, const uint8_t* const* blocks, int64_t count, int64_t inputs, float* out) {
    using namespace maxsimd;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < count; row++) unpack_row({kinds, blocks}, row, inputs, out + row * inputs);
}

// Operations a second of products whose operands are in registers, of a kind as `maxsimd_linear` counts them, in all
// threads together: what no layer can exceed. Takes some milliseconds.
double maxsimd_product_peak(int kind) {
    return maxsimd::by_kind<maxsimd::Float32, maxsimd::BFloat16, maxsimd::Int8>(
        kind, [](auto number) { return maxsimd::product_peak<decltype(number)>(); });
}

// Switches the use of AMX tiles, which is on by default where the processor has them; returns whether they are used
// now.
int maxsimd_use_amx(int wanted) {
    maxsimd::amx_wanted = wanted != 0;
    return maxsimd::uses_amx();
}
}
#pragma GCC visibility pop
