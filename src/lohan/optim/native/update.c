/* Adam and AdamW on stored state, and the norm of a gradient, in one pass over memory, with the bits of torch.
 *
 * A tile of each array is widened to f32 in L1, updated, and stored again. The arithmetic is that of the fused CPU
 * kernel in torch 2.13, read from its machine code: a multiplication and an addition are fused exactly where fmaf
 * stands here, so this file must be compiled with -ffp-contract=off. torch's vector loop and its scalar loop for the
 * last num % lanes elements differ in exp_avg_sq, and in the sign of zero in exp_avg. Which NaN an operation gives
 * depends on the order of operands a compiler chose, so no NaN is ever stored: a share that would make one stops
 * before that tile, and the caller lets torch do the rest of it. Nothing is kept between calls; safe from any thread.
 */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
/* gcc keeps to 256 bits otherwise; narrowing to 16 bits takes twice the instructions then. */
#pragma GCC target("prefer-vector-width=512")
#endif
#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__x86_64__)
#error "no F16C: torch has no fused arithmetic to match here"
#endif
#if defined(__x86_64__) && !defined(__FMA__)
#error "no FMA: torch has no fused arithmetic to match here"
#endif

enum { TILE = 64, AHEAD = 512, MAX_SHARES = 256 };
/* Shares of fewer elements take less time than starting a thread for them (about 20 us). */
enum { MIN_SHARE = 1 << 15 };
enum { BF16, FP16, FP32 };

struct update {
    void *wire;
    void *remainder; /* int16, bf16 wire only; or NULL */
    void *master;    /* f32; or NULL. Without either the wire is the master. */
    void *exp_avg, *exp_avg_sq;
    const void *grad;
    const float *multipliers;
    int64_t num, step;
    double lr, beta1, beta2, eps, weight_decay;
    int32_t wire_dtype, moment_dtype, grad_dtype, num_multipliers, decoupled, lanes;
};

struct constants {
    float decay, weight_decay, lerp, last_lerp, beta2, square, root, eps, step_size;
    int decays, base_is_grad;
};

/* Threads take shares one after another, so one whose core is busy with something else holds up none of the others. */
struct work {
    const struct update *update;
    struct constants constants;
    int64_t share, *undone;
    int32_t next, num_undone;
};

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* One tile of every array. Where there is no remainder or no master, it is NULL. */
struct tile {
    char *wire, *remainder, *master, *exp_avg, *exp_avg_sq, *grad;
};

/* Tiles are read and written where they lie, of any alignment: a copy in between, written in one width and read in
 * another, makes the processor wait and takes twice as long. */
typedef float f32 __attribute__((may_alias, aligned(1)));
typedef uint16_t u16 __attribute__((may_alias, aligned(1)));
typedef int16_t i16 __attribute__((may_alias, aligned(1)));

static inline const f32 *widen(const void *from, int dtype, float *restrict room) {
    const u16 *half = from;
    if (dtype == FP32) return from;
    if (dtype == BF16) {
        for (int i = 0; i < TILE; i++) room[i] = from_bits((uint32_t)half[i] << 16);
        return room;
    }
#if defined(__F16C__)
    for (int i = 0; i < TILE; i += 8)
        _mm256_storeu_ps(room + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(half + i))));
#else
    const _Float16 *values = from;
    for (int i = 0; i < TILE; i++) room[i] = (float)values[i];
#endif
    return room;
}

/* To nearest, ties to even, as torch's copy_ rounds. */
static inline void narrow(const float *restrict from, int dtype, void *restrict to) {
    u16 *half = to;
    if (dtype == FP32) {
        f32 *whole = to;
        for (int i = 0; i < TILE; i++) whole[i] = from[i];
    } else if (dtype == BF16) {
        for (int i = 0; i < TILE; i++) {
            uint32_t bits = bits_of(from[i]);
            half[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
        }
    } else {
#if defined(__F16C__)
        for (int i = 0; i < TILE; i += 8)
            _mm_storeu_si128((__m128i *)(half + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#else
        _Float16 *values = to;
        for (int i = 0; i < TILE; i++) values[i] = (_Float16)from[i];
#endif
    }
}

static inline const f32 *load_master(const struct tile *t, float *restrict room) {
    if (t->remainder == NULL) return (const f32 *)(t->master != NULL ? t->master : t->wire);
    const u16 *high = (const u16 *)t->wire;
    const i16 *low = (const i16 *)t->remainder;
    for (int i = 0; i < TILE; i++) room[i] = from_bits(((uint32_t)high[i] << 16) + (uint32_t)(int32_t)low[i]);
    return room;
}

static inline void store_master(const float *restrict master, int wire_dtype, const struct tile *t) {
    if (t->master != NULL) narrow(master, FP32, t->master);
    if (wire_dtype != BF16) {
        narrow(master, wire_dtype, t->wire);
        return;
    }
    u16 *high = (u16 *)t->wire, *low = (u16 *)t->remainder;
    /* Ties away from zero: lohan.optim.rounding. */
    for (int i = 0; i < TILE; i++) high[i] = (uint16_t)((bits_of(master[i]) + 0x8000) >> 16);
    if (low != NULL)
        for (int i = 0; i < TILE; i++) low[i] = (uint16_t)bits_of(master[i]);
}

/* Whether the tile could be stored: its first `vector` elements as torch's vector loop updates them and the others as
 * its scalar loop does. */
static inline int update_tile(const struct update *u, const struct constants *constants, const struct tile *t,
                              int vector) {
    const struct constants c = *constants;
    float master_room[TILE], average_room[TILE], square_room[TILE], grad_room[TILE];
    const f32 *restrict old_master = load_master(t, master_room);
    const f32 *restrict old_average = widen(t->exp_avg, u->moment_dtype, average_room);
    const f32 *restrict old_square = widen(t->exp_avg_sq, u->moment_dtype, square_room);
    const f32 *grad = widen(t->grad, u->grad_dtype, grad_room);
    for (int k = 0; k < u->num_multipliers; k++, grad = grad_room)
        for (int i = 0; i < TILE; i++) grad_room[i] = grad[i] * u->multipliers[k];
    if (c.decays && !u->decoupled) {
        for (int i = 0; i < TILE; i++) grad_room[i] = fmaf(old_master[i], c.weight_decay, grad[i]);
        grad = grad_room;
    }
    float master[TILE], average[TILE], square[TILE];
    const f32 *restrict base = c.base_is_grad ? grad : old_average;
    for (int i = 0; i < TILE; i++) average[i] = fmaf(grad[i] - old_average[i], c.lerp, base[i]);
    for (int i = 0; i < TILE; i++) square[i] = fmaf(grad[i], c.square * grad[i], c.beta2 * old_square[i]);
    for (int i = vector; i < TILE; i++) {
        average[i] = fmaf(grad[i] - old_average[i], c.last_lerp, base[i]);
        square[i] = fmaf(c.beta2, old_square[i], c.square * grad[i] * grad[i]);
    }
    uint32_t nan = 0;
    for (int i = 0; i < TILE; i++) {
        float denominator = sqrtf(square[i]) / c.root + c.eps;
        master[i] = old_master[i] * c.decay + c.step_size * average[i] / denominator;
        nan |= (master[i] != master[i]) | (average[i] != average[i]) | (square[i] != square[i]);
    }
    if (nan) return 0;
    store_master(master, u->wire_dtype, t);
    narrow(average, u->moment_dtype, t->exp_avg);
    narrow(square, u->moment_dtype, t->exp_avg_sq);
    return 1;
}

/* A fifth of the time from RAM: the processor's own prefetching ends at each page. */
static inline void prefetch(const char *array, int size) {
    if (array == NULL) return;
    for (int i = 0; i < TILE * size; i += 64) __builtin_prefetch(array + AHEAD * size + i);
}

static inline char *at(const void *array, int64_t offset) { return array == NULL ? NULL : (char *)array + offset; }

/* Updates [begin, end) and returns where it stopped. */
static int64_t run(const struct update *u, const struct constants *constants, int64_t begin, int64_t end) {
    const int wire = u->wire_dtype == FP32 ? 4 : 2, moment = u->moment_dtype == FP32 ? 4 : 2;
    const int grad = u->grad_dtype == FP32 ? 4 : 2;
    for (int64_t i = begin; i < end; i += TILE) {
        struct tile t = {
            .wire = at(u->wire, i * wire),
            .remainder = at(u->remainder, i * 2),
            .master = at(u->master, i * 4),
            .exp_avg = at(u->exp_avg, i * moment),
            .exp_avg_sq = at(u->exp_avg_sq, i * moment),
            .grad = at(u->grad, i * grad),
        };
        if (end - i >= TILE) {
            prefetch(t.wire, wire);
            prefetch(t.remainder, 2);
            prefetch(t.master, 4);
            prefetch(t.exp_avg, moment);
            prefetch(t.exp_avg_sq, moment);
            prefetch(t.grad, grad);
            if (!update_tile(u, constants, &t, TILE)) return i;
            continue;
        }
        int num = (int)(end - i);
        char *arrays[] = {t.wire, t.remainder, t.master, t.exp_avg, t.exp_avg_sq, t.grad};
        int sizes[] = {wire, 2, 4, moment, moment, grad};
        char copies[6][4 * TILE];
        memset(copies, 0x3f, sizeof copies); /* beyond the end: a number near 1 in every dtype */
        for (int k = 0; k < 6; k++)
            if (arrays[k] != NULL) memcpy(copies[k], arrays[k], (size_t)(num * sizes[k]));
        struct tile whole = {
            .wire = copies[0],
            .remainder = t.remainder == NULL ? NULL : copies[1],
            .master = t.master == NULL ? NULL : copies[2],
            .exp_avg = copies[3],
            .exp_avg_sq = copies[4],
            .grad = copies[5],
        };
        if (!update_tile(u, constants, &whole, num - num % u->lanes)) return i;
        for (int k = 0; k < 5; k++)
            if (arrays[k] != NULL) memcpy(arrays[k], copies[k], (size_t)(num * sizes[k]));
    }
    return end;
}

static void *take_shares(void *argument) {
    struct work *work = argument;
    int64_t num = work->update->num;
    for (;;) {
        int64_t begin = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED) * work->share;
        if (begin >= num) return NULL;
        int64_t end = begin + work->share < num ? begin + work->share : num;
        int64_t stopped = run(work->update, &work->constants, begin, end);
        if (stopped < end) {
            int32_t index = __atomic_fetch_add(&work->num_undone, 1, __ATOMIC_RELAXED);
            work->undone[2 * index] = stopped;
            work->undone[2 * index + 1] = end;
        }
    }
}

static struct constants constants_of(const struct update *u) {
    /* In double and then rounded, as torch does; its compiler fuses the decay. */
    double coefficient = 1 - u->beta1;
    float lerp = (float)coefficient;
    int small = fabsf(lerp) < 0.5f;
    struct constants c = {
        .decay = u->decoupled ? (float)fma(-u->lr, u->weight_decay, 1.0) : 1.0f, /* times 1 changes no bit */
        .weight_decay = (float)u->weight_decay,
        .lerp = small ? lerp : lerp - 1.0f,
        .last_lerp = small ? lerp : -(1.0f - lerp), /* with beta1 = 0 one is 0 and the other -0 */
        .beta2 = (float)u->beta2,
        .square = (float)(1 - u->beta2),
        .root = (float)sqrt(1 - pow(u->beta2, (double)u->step)),
        .eps = (float)u->eps,
        .step_size = (float)-(u->lr / (1 - pow(u->beta1, (double)u->step))),
        .decays = u->weight_decay != 0,
        .base_is_grad = !small,
    };
    return c;
}

static void take_shares_in_team(void *argument) { take_shares(argument); }

/* GOMP_parallel() of OpenMP: calls the function on as many threads of the calling thread's team, and waits for them. */
typedef void team_call(void (*function)(void *), void *argument, unsigned num_threads, unsigned flags);

/* Runs on up to num_threads threads, this one among them: of `team`, or new ones where that is NULL. Writes [begin, end)
 * of what torch must do into `undone`, which has room for MAX_SHARES pairs, and returns how many there are. */
int32_t lohan_update(const struct update *u, int32_t num_threads, team_call *team, int64_t *undone) {
    int64_t share = MIN_SHARE;
    while (share * MAX_SHARES < u->num) share *= 2;
    int64_t num_shares = (u->num + share - 1) / share;
    struct work work = {.update = u, .constants = constants_of(u), .share = share, .undone = undone};
    if (team != NULL && num_threads > 1 && num_shares > 1) {
        team(take_shares_in_team, &work, (unsigned)num_threads, 0);
        return work.num_undone;
    }
    pthread_t threads[MAX_SHARES];
    int started = 0;
    while (started + 1 < num_threads && started + 1 < num_shares &&
           pthread_create(&threads[started], NULL, take_shares, &work) == 0)
        started++;
    take_shares(&work);
    for (int k = 0; k < started; k++) pthread_join(threads[k], NULL);
    return work.num_undone;
}

/* -- a master cut into a bf16 weight and the rest of its bits, as rounding.py does it -- */

void lohan_split(const uint32_t *restrict master, uint16_t *restrict wire, uint16_t *restrict remainder, int64_t num) {
    for (int64_t i = 0; i < num; i++) {
        uint32_t bits = master[i];
        uint32_t rounded = (bits + 0x8000u) >> 16, kept = (bits >> 16) | 0x40u;
        wire[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? kept : rounded);
        remainder[i] = (uint16_t)bits;
    }
}

/* -- the norm of a gradient, bf16 or fp16 -- */

static inline void add_squares(const float *restrict values, int num, int lanes, float *restrict sums) {
    for (int i = 0; i < num; i += lanes)
        for (int k = 0; k < lanes; k++) sums[k] += values[i + k] * values[i + k];
}

static inline __attribute__((always_inline)) float norm(const void *grad, int64_t num, int dtype, int lanes) {
    float sums[16] = {0}, values[TILE] = {0};
    int64_t i = 0;
    for (; i + TILE <= num; i += TILE) {
        widen(at(grad, i * 2), dtype, values);
        add_squares(values, TILE, lanes, sums);
    }
    int rest = (int)(num - i), whole = rest - rest % lanes;
    char last[2 * TILE] = {0};
    memcpy(last, at(grad, i * 2), (size_t)(rest * 2));
    widen(last, dtype, values);
    add_squares(values, whole, lanes, sums);
    float sum = 0;
    for (int k = 0; k < lanes; k++) sum += sums[k];
    for (int k = whole; k < rest; k++) sum += values[k] * values[k];
    return sqrtf(sum);
}

/* The 2-norm as torch finds it for an f32 copy: one sum for each lane from first to last, in one thread. */
float lohan_norm(const void *grad, int64_t num, int32_t dtype, int32_t lanes) {
    if (lanes == 8) return dtype == BF16 ? norm(grad, num, BF16, 8) : norm(grad, num, FP16, 8);
    if (lanes == 16) return dtype == BF16 ? norm(grad, num, BF16, 16) : norm(grad, num, FP16, 16);
    return dtype == BF16 ? norm(grad, num, BF16, 4) : norm(grad, num, FP16, 4);
}
