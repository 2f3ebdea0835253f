// Products in AMX tiles, of bfloat16 and int8, on processors that have them.
//
// A block of packed columns is a sequence of tiles: sixteen units of sixteen columns are a kilobyte. Four tiles hold
// the sums of 32 rows and 32 columns. The rows of a tile beyond those that are present may hold anything.
#pragma once

#include <atomic>

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

// Multiplies in tiles. Configures a thread's tile registers for as long as it lives.
//
// The epilogue of a tile is computed between the products of the next one, so that neither waits for the other.
template <class Number>
class Tiles {
  public:
    static constexpr int TILE_ROWS = 32, HALF = 16;
    static constexpr int64_t MOST_ROWS = 8 * TILE_ROWS;
    static constexpr int64_t AT_ONCE = 768 << 10;

    Tiles(const Linear<Number>& linear, int64_t most)
        : linear_(linear), rows_(is_in_place() ? HALF : round_up(most, HALF), linear.units()) {
        const TileShapes shapes;
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
    ~Tiles() { asm volatile("tilerelease" ::); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    void take(int64_t first, int64_t count) {
        first_ = first;
        count_ = count;
        in_place_ = is_in_place() ? count / HALF * HALF : 0;
        for (int64_t row = in_place_; row < count; row++) rows_.take(linear_, first + row, row - in_place_);
    }

    void multiply_all(int64_t first, int64_t last, const Stretch& next) {
        const int64_t tiles = (count_ + TILE_ROWS - 1) / TILE_ROWS, panels = (last - first) / PANEL;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t row = tile * TILE_ROWS, present = std::min<int64_t>(TILE_ROWS, count_ - row);
            for (int64_t column = first; column < last; column += PANEL) {
                const Ahead ahead(next, tile * panels + (column - first) / PANEL, tiles * panels);
                if (present > HALF)
                    multiply_tiles<2>(row, column, ahead);
                else
                    multiply_tiles<1>(row, column, ahead);
                pending_ = {row, column, present, 0};
            }
        }
    }

    void complete() { finish_some(TILE_ROWS); }

  private:
    // Whether rows can be read without a copy: whole tiles in whole cache lines.
    bool is_in_place() const {
        return std::is_same_v<Number, BFloat16> && linear_.inputs % 32 == 0 && linear_.x_stride % 32 == 0 &&
               (uintptr_t)linear_.x % 64 == 0;
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

    // Tiles 0 to 3 are sums, 4 and 5 of rows, 6 and 7 of columns.
    template <int HALVES>
    void multiply_tiles(int64_t row, int64_t column, Ahead ahead) {
        const Half upper = half(row), lower = HALVES == 2 ? half(row + HALF) : upper;
        const Unit *left = linear_.block(column), *right = linear_.block(column + LANES);
        const int64_t units = linear_.units(), each = (TILE_ROWS * LANES + units - 1) / units;
        const int64_t lines = (ahead.lines() * LANES + units - 1) / units;
        asm volatile("tilezero %tmm0\n tilezero %tmm1\n tilezero %tmm2\n tilezero %tmm3");
        for (int64_t unit = 0; unit < units; unit += LANES) {
            load_tile_once<6>(left + unit * LANES, LANES);
            load_tile<4>(upper.at + unit, upper.stride);
            Dot<Number>::template add<0, 4, 6>();
            load_tile_once<7>(right + unit * LANES, LANES);
            Dot<Number>::template add<1, 4, 7>();
            if constexpr (HALVES == 2) {
                load_tile<5>(lower.at + unit, lower.stride);
                Dot<Number>::template add<2, 5, 6>();
                Dot<Number>::template add<3, 5, 7>();
            }
            ahead.fetch(lines);
            finish_some(each);
        }
        store_tile<0>(sums_, PANEL);
        store_tile<1>(sums_ + LANES, PANEL);
        if constexpr (HALVES == 2) {
            store_tile<2>(sums_ + HALF * PANEL, PANEL);
            store_tile<3>(sums_ + HALF * PANEL + LANES, PANEL);
        }
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

    const Linear<Number>& linear_;
    Rows rows_;
    int64_t first_ = 0, count_ = 0, in_place_ = 0;
    struct {
        int64_t row, column, count, done;
    } pending_{};  // rows of `sums_`
    alignas(64) Unit sums_[TILE_ROWS * PANEL];
};

#else

inline bool uses_amx() { return false; }

#endif

}  // namespace maxsimd
