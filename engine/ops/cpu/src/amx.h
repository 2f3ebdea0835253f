// Products in AMX tiles, of bfloat16 and int8, on processors that have them.
//
// A block of packed columns is a sequence of tiles: sixteen units of sixteen columns are a kilobyte. Four tiles hold
// the sums of 32 rows and 32 columns. The rows of a tile beyond those that are present may hold anything.
#pragma once

#include <atomic>
#include <vector>

#include "linear.h"
#include "rows.h"

#if defined(__linux__) && defined(__has_include)
#if __has_include(<amxtileintrin.h>)
#define MAXSIMD_AMX
#endif
#endif

#ifdef MAXSIMD_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define MAXSIMD_WITH_AMX __attribute__((target("amx-tile,amx-bf16,amx-int8")))
#endif

namespace maxsimd {

inline std::atomic<bool> amx_wanted{true};

#ifdef MAXSIMD_AMX

// Whether the processor has tiles of both kinds, and the kernel lets this process use their registers.
inline bool is_amx_granted() {
    static const bool granted = [] {
        unsigned a, b, c, d;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
        constexpr unsigned bfloat16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25;
        if ((d & (bfloat16 | tile | int8)) != (bfloat16 | tile | int8)) return false;
        constexpr long request_permission = 0x1023, tile_data = 18;
        return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    }();
    return granted;
}

inline bool uses_amx() { return amx_wanted && is_amx_granted(); }

// Eight tiles of sixteen rows of 64 bytes.
struct TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

template <class Number>
struct Dot;

template <>
struct Dot<BFloat16> {
    template <int SUM, int ROWS, int COLUMNS>
    static inline __attribute__((always_inline)) void add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(ROWS), "i"(COLUMNS));
    }
};
template <>
struct Dot<Int8> {
    template <int SUM, int ROWS, int COLUMNS>
    static inline __attribute__((always_inline)) void add() {
        asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(ROWS), "i"(COLUMNS));
    }
};

template <int TILE>
inline __attribute__((always_inline)) void load_tile(const Unit* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride * sizeof(Unit)), "i"(TILE) : "memory");
}

// As above, for data that is not needed again soon.
template <int TILE>
inline __attribute__((always_inline)) void load_tile_once(const Unit* from, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride * sizeof(Unit)), "i"(TILE) : "memory");
}

template <int TILE>
inline __attribute__((always_inline)) void store_tile(Unit* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride * sizeof(Unit)), "i"(TILE) : "memory");
}

// Configures a thread's tile registers for as long as it lives.
class TileRegisters {
  public:
    TileRegisters() {
        const TileShapes shapes;
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
    ~TileRegisters() { asm volatile("tilerelease" ::); }
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;
};

constexpr int HALF = 16;  // the rows of a tile; two tiles are multiplied with the same columns

inline __attribute__((always_inline)) void clear_sums() {
    asm volatile("tilezero %tmm0\n tilezero %tmm1\n tilezero %tmm2\n tilezero %tmm3");
}

// Adds to the sums, which are in tiles 0 to 3, the products of one tile of rows or two, in 4 and 5, with two of columns,
// in 6 and 7. Rows are `stride` units apart.
template <class Number, int HALVES>
inline __attribute__((always_inline)) void add_tiles(const Unit* upper, const Unit* lower, int64_t stride,
                                                     int64_t lower_stride, const Unit* left, const Unit* right) {
    load_tile_once<6>(left, LANES);
    load_tile<4>(upper, stride);
    Dot<Number>::template add<0, 4, 6>();
    load_tile_once<7>(right, LANES);
    Dot<Number>::template add<1, 4, 7>();
    if constexpr (HALVES == 2) {
        load_tile<5>(lower, lower_stride);
        Dot<Number>::template add<2, 5, 6>();
        Dot<Number>::template add<3, 5, 7>();
    }
}

// Loads the sums, whose rows are `stride` units apart.
template <int HALVES>
inline __attribute__((always_inline)) void load_sums(const Unit* from, int64_t stride) {
    load_tile<0>(from, stride);
    load_tile<1>(from + LANES, stride);
    if constexpr (HALVES == 2) {
        load_tile<2>(from + HALF * stride, stride);
        load_tile<3>(from + HALF * stride + LANES, stride);
    }
}

// Stores them likewise.
template <int HALVES>
inline __attribute__((always_inline)) void store_sums(Unit* to, int64_t stride) {
    store_tile<0>(to, stride);
    store_tile<1>(to + LANES, stride);
    if constexpr (HALVES == 2) {
        store_tile<2>(to + HALF * stride, stride);
        store_tile<3>(to + HALF * stride + LANES, stride);
    }
}

// Multiplies in tiles.
//
// The first-level cache has room for 32 rows of some units. With more units a layer is computed in chunks of them: all
// rows with the first units of some panels, then with the next, and so on; meanwhile the sums stay in memory.
//
// The epilogue of a tile is computed between the products of the next one, so that neither waits for the other.
template <class Number>
class Tiles {
  public:
    static constexpr int TILE_ROWS = 2 * HALF;
    static constexpr BlockSizes SIZES{8 * TILE_ROWS, TILE_ROWS};
    static constexpr int64_t FEW_ROWS = 3 * TILE_ROWS;

    Tiles(const Linear<Number>& linear, int64_t most)
        : linear_(linear),
          most_(round_up(most, TILE_ROWS)),
          chunk_(chunk(linear.units())),
          rows_(is_in_place() ? HALF : most_, linear.units()) {
        if (!is_chunked()) return;
        static thread_local std::vector<Unit> storage;  // kept, because new memory costs as much as small products
        storage.resize(std::max<size_t>(storage.size(), most_ * panels_at_once(linear.units()) * PANEL + LANES));
        partial_ = (Unit*)round_up((int64_t)storage.data(), 64);
    }

    // Sums of many panels would not stay in the second-level cache, beside weights and rows. With few, rows are read
    // more often, which matters where they do not stay there either.
    int64_t panels_at_once(int64_t units) const {
        if (chunk(units) >= units) return whole_panels(768 << 10, units);
        return most_ * units * (int64_t)sizeof(Unit) <= 768 << 10 ? 4 : 8;
    }

    void take(int64_t first, int64_t count) {
        first_ = first;
        count_ = count;
        in_place_ = is_in_place() ? count / HALF * HALF : 0;
        for (int64_t row = in_place_; row < count; row++) rows_.take(linear_, first + row, row - in_place_);
    }

    void multiply_all(int64_t first, int64_t last, const Stretch& next) {
        const int64_t units = linear_.units(), panels = (last - first) / PANEL;
        for (int64_t begin = 0; begin < units; begin += chunk_) {
            const int64_t end = std::min(units, begin + chunk_);
            Stretch upcoming = next;
            if (next.blocks > 0) {
                if (end < units) {
                    upcoming = linear_.stretch(first / PANEL, last / PANEL);
                    upcoming.start += end * LANES;
                }
                upcoming.lines = std::min(end < units ? units - end : next.lines, chunk(upcoming.units));
            }
            const int64_t tiles = (count_ + TILE_ROWS - 1) / TILE_ROWS;
            // Two tiles or three are multiplied with one panel after the other, and each panel is fetched at once, if it
            // is so large that the model's weights come from memory. From the third-level cache this is slower.
            const bool by_panel = tiles > 1 && count_ <= FEW_ROWS && units >= 512;
            for (int64_t i = 0; i < tiles * panels; i++) {
                const int64_t tile = by_panel ? i % tiles : i / panels, panel = by_panel ? i / tiles : i % panels;
                const int64_t row = tile * TILE_ROWS, column = first + panel * PANEL;
                if (by_panel && tile == 0) {
                    Ahead whole(linear_.stretch(column / PANEL, column / PANEL + 1), 0, 1);
                    whole.fetch(whole.lines());
                }
                const Ahead ahead(upcoming, i, tiles * panels);
                const int64_t present = std::min<int64_t>(TILE_ROWS, count_ - row);
                Unit* partial = is_chunked() ? partial_ + (tile * panels + panel) * TILE_ROWS * PANEL : nullptr;
                if (present > HALF)
                    multiply_tiles<2>(row, column, begin, end, partial, ahead);
                else
                    multiply_tiles<1>(row, column, begin, end, partial, ahead);
                if (end == units) pending_ = {row, column, present, 0};
            }
        }
    }

    void complete() { finish_some(TILE_ROWS); }

  private:
    // Units that are multiplied at a time: 32 rows take at most 36 KiB. With few rows all units, since most of the time
    // goes into reading weights, which is faster in the order in which they lie in memory.
    int64_t chunk(int64_t units) const {
        const int64_t whole = round_up(units, LANES);
        const int64_t parts = most_ <= FEW_ROWS || whole <= 256 ? 1 : (whole + 287) / 288;
        return round_up((whole + parts - 1) / parts, LANES);
    }
    bool is_chunked() const { return chunk_ < linear_.units(); }

    // Whether rows can be read without a copy: whole tiles in whole cache lines, which stay in the cache.
    bool is_in_place() const {
        return std::is_same_v<Number, BFloat16> && linear_.inputs % 32 == 0 && linear_.x_stride % 32 == 0 &&
               (uintptr_t)linear_.x % 64 == 0 && (!is_chunked() || are_apart(linear_.x_stride / 2));
    }

    struct Half {
        const Unit* at;
        int64_t stride;
    };

    // Sixteen rows of the task: where they are in memory, or in the copy.
    Half half(int64_t row) {
        if (row < in_place_)
            return {(const Unit*)(linear_.x + (first_ + row) * linear_.x_stride), linear_.x_stride / 2};
        return {rows_.at(row - in_place_), rows_.stride()};
    }

    // Adds the products of some units. Sums of earlier units are in `partial`; the last go to `sums_`.
    template <int HALVES>
    void multiply_tiles(int64_t row, int64_t column, int64_t begin, int64_t end, Unit* partial, Ahead ahead) {
        const Half upper = half(row), lower = HALVES == 2 ? half(row + HALF) : upper;
        const Unit *left = linear_.block(column), *right = linear_.block(column + LANES);
        const int64_t steps = (end - begin + LANES - 1) / LANES, each = (TILE_ROWS + steps - 1) / steps;
        const int64_t lines = (ahead.lines() + steps - 1) / steps;
        if (begin == 0)
            clear_sums();
        else
            load_sums<HALVES>(partial, PANEL);
        for (int64_t unit = begin; unit < end; unit += LANES) {
            add_tiles<Number, HALVES>(upper.at + unit, lower.at + unit, upper.stride, lower.stride, left + unit * LANES,
                                      right + unit * LANES);
            ahead.fetch(lines);
            finish_some(each);
        }
        store_sums<HALVES>(end < linear_.units() ? partial : sums_, PANEL);
    }

    void finish_some(int64_t rows) {
        const int64_t count = std::min(rows, pending_.count - pending_.done);
        if (count == 0) return;
        const int64_t row = pending_.row + pending_.done;
        // Rows that are read without a copy are not quantised, so they have no scales.
        const float* scales = in_place_ ? nullptr : rows_.scales(row);
        finish(linear_, sums_ + pending_.done * PANEL, scales, count, first_ + row, pending_.column);
        pending_.done += count;
    }

    const TileRegisters registers_;
    const Linear<Number>& linear_;
    const int64_t most_, chunk_;
    Rows rows_;
    int64_t first_ = 0, count_ = 0, in_place_ = 0;
    struct {
        int64_t row, column, count, done;
    } pending_{};  // rows of `sums_`
    alignas(64) Unit sums_[TILE_ROWS * PANEL];
    Unit* partial_ = nullptr;  // [tiles][panels][TILE_ROWS][PANEL]
};

#else

inline bool uses_amx() { return false; }

#endif

}  // namespace maxsimd
