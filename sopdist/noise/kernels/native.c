/* CPU kernels: the fused loss and the update of the rows, in plain C called through ctypes.
 *
 * Row updates do the operations of reference_rows.py in the same order, each correctly rounded (compiled with
 * -ffp-contract=off: no fused multiply-add), so a row has the same bits. A batch is processed in order, so an index
 * that occurs twice is visited twice.
 *
 * Sums use LANES partial sums in a fixed order, so they do not depend on the number of threads.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EVERY_CPU __attribute__((target_clones("avx2", "default"), noinline))
#else
#define FOR_EVERY_CPU
#endif

#define INLINE static inline __attribute__((always_inline)) /* into each clone: vectors must not cross clones */

enum { FLOW = 0, PAPER = 1, OFFICIAL = 2, VOTES = 3 };
static const int64_t DROPPED = -1;
static const int32_t FREE = -1;
static const float SMALLEST_TARGET = 1e-12f, LARGEST_AGREEMENT = 1.0f - 1e-4f; /* facts.py */

typedef struct {
    const float *u, *v;
    const void *classes; /* NULL: dense */
    int64_t slots;       /* columns of classes */
    int64_t class_bytes; /* 2 or 4 */
} Block;

INLINE int32_t class_at(const void *classes, int64_t class_bytes, int64_t at) {
    return class_bytes == 2 ? ((const int16_t *)classes)[at] : ((const int32_t *)classes)[at];
}

INLINE float at_most_1(float x) { return x < 1.0f ? x : 1.0f; }

/* ---- (a) the loss ------------------------------------------------------------------------------------------------ */

/* LANES floats: the width of one vector register. */
#if defined(__x86_64__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Mask __attribute__((vector_size(4 * LANES)));

INLINE Vec all(float x) { return (Vec){0} + x; }

INLINE Vec choose(Mask mask, Vec yes, Vec no) { return (Vec)(((Mask)yes & mask) | ((Mask)no & ~mask)); }

INLINE int any(Mask mask) {
    int64_t halves[sizeof(Mask) / 8], found = 0;
    memcpy(halves, &mask, sizeof mask);
    for (size_t j = 0; j < sizeof(Mask) / 8; j++) found |= halves[j];
    return found != 0;
}

/* Load min(count, LANES) floats; the other lanes hold `pad`. */
INLINE Vec load(const float *x, int64_t count, float pad) {
    Vec vec;
    if (count >= LANES) {
        memcpy(&vec, x, sizeof vec);
    } else {
        vec = all(pad);
        memcpy(&vec, x, sizeof(float) * (size_t)count);
    }
    return vec;
}

INLINE void store(float *x, int64_t count, Vec vec) {
    if (count >= LANES)
        memcpy(x, &vec, sizeof vec);
    else
        memcpy(x, &vec, sizeof(float) * (size_t)count);
}

INLINE float sum_lanes(Vec vec) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int j = 0; j < width; j++) vec[j] += vec[j + width];
    return vec[0];
}

/* e^x for x <= 0, within 2 units in the last place; 0 below -87. */
INLINE Vec exp_negative(Vec x) {
    const Vec magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    Mask tiny = x < all(-87.0f);
    x = choose(tiny, all(-87.0f), x);
    Vec shifted = x * 1.44269504f + magic;
    Vec n = shifted - magic;
    Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vec series = r * 1.98756915e-4f + 1.39819995e-3f;
    series = series * r + 8.33345190e-3f;
    series = series * r + 4.16657962e-2f;
    series = series * r + 1.66666655e-1f;
    series = series * r + 0.5f;
    series = (series * r) * r + r + 1.0f;
    Mask power = ((Mask)shifted - 0x4B400000 + 127) << 23;
    return choose(tiny, all(0.0f), series * (Vec)power);
}

INLINE float row_max(const float *z, int64_t count) {
    Vec best = all(-INFINITY);
    for (int64_t k = 0; k < count; k += LANES) {
        Vec x = load(z + k, count - k, -INFINITY);
        best = choose(x > best, x, best);
    }
    float top = best[0];
    for (int j = 1; j < LANES; j++) top = best[j] > top ? best[j] : top;
    return top;
}

INLINE float row_sum(const float *z, int64_t count) {
    Vec sum = all(0.0f);
    for (int64_t k = 0; k < count; k += LANES) sum += load(z + k, count - k, 0.0f);
    return sum_lanes(sum);
}

/* Position of the first `value`. It exists: it is the maximum of a row without NaN. */
INLINE int64_t first_equal(const float *z, float value, int64_t count) {
    int64_t k = 0;
    for (int found = 0; k + 64 <= count; k += 64) {
        for (int j = 0; j < 64; j++) found |= z[k + j] == value;
        if (found) break;
    }
    while (z[k] != value) k++;
    return k;
}

/* e <- e^(z - top); returns the sum. */
INLINE float row_exp(float *e, const float *z, float top, int64_t count) {
    Vec sum = all(0.0f);
    for (int64_t k = 0; k < count; k += LANES) {
        Vec x = exp_negative(load(z + k, count - k, -INFINITY) - top);
        store(e + k, count - k, x);
        sum += x;
    }
    return sum_lanes(sum);
}

/* p <- p * factor; then S = sum of max(p - minus_s, eps), and the sum of p where p - minus_s > eps. */
INLINE void clipped_sums(float *p, float factor, const float *minus_s, float eps, int64_t count, float *total,
                                float *live) {
    Vec clipped = all(0.0f), open = all(0.0f);
    for (int64_t k = 0; k < count; k += LANES) {
        Vec x = load(p + k, count - k, 0.0f) * factor;
        Vec w = x - load(minus_s + k, count - k, 0.0f);
        Mask above = w > all(eps);
        store(p + k, count - k, x);
        clipped += choose(above, w, all(eps));
        open += choose(above, x, all(0.0f));
    }
    int64_t padding = (LANES - count % LANES) % LANES; /* lanes past the end, each of which added eps */
    for (int64_t j = LANES - padding; j < LANES; j++) clipped[j] -= eps;
    *total = sum_lanes(clipped);
    *live = sum_lanes(open);
}

/* p <- p ([p - minus_s > eps] - mean) */
INLINE void row_gradient(float *p, const float *minus_s, float eps, float mean, int64_t count) {
    for (int64_t k = 0; k < count; k += LANES) {
        Vec x = load(p + k, count - k, 0.0f);
        Mask above = x - load(minus_s + k, count - k, 0.0f) > all(eps);
        store(p + k, count - k, x * (choose(above, all(1.0f), all(0.0f)) - mean));
    }
}

/* The sum of p t with t = minus_s, where it is not too small. */
INLINE float row_agreement(const float *p, const float *minus_s, int64_t count) {
    Vec sum = all(0.0f);
    for (int64_t k = 0; k < count; k += LANES) {
        Vec t = load(minus_s + k, count - k, 0.0f);
        sum += load(p + k, count - k, 0.0f) * choose(t > all(SMALLEST_TARGET), t, all(0.0f));
    }
    return sum_lanes(sum);
}

/* One sample. `minus_s` (K) is scratch: v^2 of each class, and -u^2 at the label, so that w = p - minus_s for all classes.
 * With slots it is 0 on entry and on return. `p` is the row of the gradient; it holds the probabilities until step 3. */
FOR_EVERY_CPU static void loss_of_sample(const float *z, int64_t y, int64_t row, Block block, int keep, float eps, int reclip,
                                         float target, int64_t K, float *minus_s, float *p, float *loss, float *scale,
                                         int64_t *predicted, float *cross_entropy, float *margin, float *pull, float *fit) {
    float top = row_max(z, K);
    if (!keep || !(fabsf(row_sum(z, K)) < INFINITY && top - z[y] < INFINITY)) { /* a NaN spreads to the sum */
        memset(p, 0, sizeof(float) * (size_t)K);
        *loss = *scale = *cross_entropy = *margin = *pull = *fit = 0.0f;
        *predicted = DROPPED;
        return;
    }
    /* 1. The prediction (the lowest class on ties), and the strongest rival of the label. */
    int64_t best = first_equal(z, top, K);
    float rival = best != y ? top : fmaxf(row_max(z, y), row_max(z + y + 1, K - y - 1));

    /* 2. Probabilities and squares. */
    float denominator = row_exp(p, z, top, K), inverse = 1.0f / denominator;
    float p_y = p[y] * inverse, p_rival = exp_negative(all(rival - top))[0] * inverse;
    float u = block.u[row], w_y = p_y + at_most_1(u * u);
    if (block.classes == NULL) {
        const float *v = block.v + row * K;
        for (int64_t k = 0; k < K; k++) minus_s[k] = at_most_1(v[k] * v[k]);
    } else {
        for (int64_t j = row * block.slots; j < (row + 1) * block.slots; j++) {
            int32_t k = class_at(block.classes, block.class_bytes, j);
            if (k != FREE) minus_s[k] = at_most_1(block.v[j] * block.v[j]);
        }
    }
    minus_s[y] = -at_most_1(u * u);

    /* 3. S dloss/dz_k = p_k ([w_k > eps] - mean) - [k = y, w_y > eps] S p_y/c_y */
    float total, live;
    clipped_sums(p, inverse, minus_s, eps, K, &total, &live);
    float c_y = w_y > eps ? w_y : eps;
    int live_y = w_y > eps;
    float own = live_y ? total / c_y * p_y : 0.0f, mean = live - own;
    *loss = logf(total / c_y);
    *scale = 1.0f / total;
    *pull = live_y ? 1.0f / c_y - *scale : 0.0f;
    *predicted = best;
    *cross_entropy = (top - z[y]) + logf(denominator);
    *margin = p_y - p_rival;
    *fit = p_y;
    if (reclip && c_y * *scale < eps) {
        *loss = -logf(eps);
        *pull = 0.0f;
        memset(p, 0, sizeof(float) * (size_t)K);
    } else if (target > 0.0f) {
        /* 4. The target: 1 - u^2 at the label, v^2 elsewhere. `minus_s` at the label is negative, so it adds nothing. */
        float t_y = 1.0f - at_most_1(u * u), agreement = row_agreement(p, minus_s, K) + p_y * t_y;
        float factor = agreement < LARGEST_AGREEMENT ? -target * total / (1.0f - agreement) : 0.0f;
        *loss += target * logf(1.0f - (agreement < LARGEST_AGREEMENT ? agreement : LARGEST_AGREEMENT));
        for (int64_t k = 0; k < K; k++) {
            float t = minus_s[k] > SMALLEST_TARGET ? minus_s[k] : 0.0f;
            float live_k = p[k] - minus_s[k] > eps ? 1.0f : 0.0f;
            p[k] = p[k] * (live_k - mean) + factor * p[k] * ((k == y ? t_y : t) - agreement);
        }
        p[y] -= own;
    } else {
        row_gradient(p, minus_s, eps, mean, K);
        p[y] -= own;
    }
    if (block.classes != NULL) {
        for (int64_t j = row * block.slots; j < (row + 1) * block.slots; j++) {
            int32_t k = class_at(block.classes, block.class_bytes, j);
            if (k != FREE) minus_s[k] = 0.0f;
        }
        minus_s[y] = 0.0f;
    }
}

/* Arrays as in triton_loss.py; `keep` may be NULL; `scratch` is (threads, K) zeros. */
void sopdist_loss(const float *logits, const int64_t *labels, const int64_t *index, const uint8_t *keep, const float *u,
                 const float *v, const void *classes, int64_t slots, int64_t class_bytes, int64_t B, int64_t K, float eps,
                 int reclip, float target, int threads, float *scratch, float *losses, float *gradient, float *scale,
                 int64_t *predicted, float *cross_entropy, float *margin, float *pull, float *fit) {
    Block block = {u, v, classes, slots, class_bytes};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < B; i++)
        loss_of_sample(logits + i * K, labels[i], index[i], block, keep == NULL || keep[i], eps, reclip, target, K,
                       scratch + omp_get_thread_num() * K, gradient + i * K, losses + i, scale + i, predicted + i,
                       cross_entropy + i, margin + i, pull + i, fit + i);
}

/* ---- (b) the rows ------------------------------------------------------------------------------------------------ */

typedef struct {
    int rule;
    float v, u;
} Step;

/* Paper: project onto [-1, 1]. Official: an entry whose square exceeds 1 gets no gradient. */
INLINE float euler(float x, float q, float new, int rule) {
    if (rule == PAPER) return new < -1.0f ? -1.0f : new > 1.0f ? 1.0f : new;
    return q > 1.0f ? x : new;
}

/* Return an entry of v after a visit; h: whether the network contradicts the label there, and by what margin. */
INLINE float advance(float x, int h, Step step, float vote) {
    if (step.rule == VOTES) return h ? x + vote : x;
    float q = x * x;
    if (step.rule == FLOW) return copysignf(sqrtf(q / (h ? q + (1.0f - q) * step.u : 1.0f + q * step.v)), x);
    return euler(x, q, x + (x * step.v) * (h ? 1.0f - q : -q), step.rule);
}

INLINE float next_u(float u, int wrong, float margin, float pull, Step step) {
    if (step.rule == VOTES) return wrong ? u : u + margin;
    if (step.rule == FLOW) return advance(u, wrong, step, margin);
    float q = u * u;
    if (step.rule == OFFICIAL) pull = pull - 2.0f * (wrong ? q - 1.0f : q);
    return euler(u, q, u + (u * step.u) * pull, step.rule);
}

/* Initial v of (sample, class): counter.py, operation for operation. */
static float initial_v(uint64_t seed, uint64_t sample, uint32_t class_, float std) {
    uint32_t c0 = class_ >> 2, c1 = (uint32_t)sample, c2 = (uint32_t)(sample >> 32), c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t high = (uint64_t)0xCD9E8D57u * c2, low = (uint64_t)0xD2511F53u * c0;
        c0 = (uint32_t)(high >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(low >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)high;
        c3 = (uint32_t)low;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    uint32_t radius_word = class_ & 2 ? c2 : c0, angle_word = class_ & 2 ? c3 : c1;

    /* 1. Odd integers in (0, 2^24). */
    float radius_odd = (float)((radius_word >> 9) * 2 + 1);
    int32_t angle_odd = (int32_t)(angle_word >> 9) * 2 + 1;

    /* 2. ln(odd / 2^24) = ln m + (e - 24) ln 2, ln m = 2 atanh f. */
    int32_t bits, exponent;
    memcpy(&bits, &radius_odd, sizeof bits);
    exponent = (bits >> 23) - (127 + 24);
    bits = (bits & 0x7FFFFF) | 0x3F800000;
    float m;
    memcpy(&m, &bits, sizeof m);
    if (m > 1.41421354f) {
        m = m * 0.5f;
        exponent++;
    }
    float f = (m - 1.0f) / (m + 1.0f), s = f * f;
    float series = ((((s * 0.11111111f) + 0.14285715f) * s + 0.2f) * s + 0.33333334f) * s + 1.0f;
    float radius = sqrtf(((float)exponent * 0.6931472f + (f * 2.0f) * series) * -2.0f);

    /* 3. cos or sin of odd / 2^24 turns. */
    int32_t quarter = (angle_odd + (1 << 21)) >> 22;
    float y = (float)(angle_odd - (quarter << 22)) * 3.7450704e-07f, y2 = y * y;
    int want_sine = class_ & 1, odd = quarter & 1, quadrant = quarter & 3;
    float turn;
    if (want_sine == odd) {
        turn = ((((y2 * 2.4801588e-05f) - 1.3888889e-03f) * y2 + 4.1666668e-02f) * y2 - 0.5f) * y2 + 1.0f;
    } else {
        turn = ((((y2 * 2.7557319e-06f) - 1.9841270e-04f) * y2 + 8.3333338e-03f) * y2 - 1.6666667e-01f) * y2;
        turn = turn * y + y;
    }
    int negative = want_sine ? quadrant >= 2 : quadrant == 1 || quadrant == 2;
    return (radius * (negative ? -turn : turn)) * std;
}

/* Shrink the entries of all classes except the predicted one and the label. If the square of an entry is too small to
 * change 1 when added to it, the arithmetic would keep the bits of the entry. Nearly all entries are that small, so
 * blocks that contain no other are skipped. */
FOR_EVERY_CPU static void shrink_row(float *v, int64_t K, int64_t predicted, int64_t label, Step step, float vote) {
    float kept_label = v[label], kept_predicted = v[predicted];
    if (step.rule == VOTES) K = 0; /* nothing shrinks */
    float unseen = step.v > 0.0f ? fminf(sqrtf(0x1p-26f / step.v), 1.0f) : 1.0f; /* entries beyond 1 are projected */
    for (int64_t k = 0; k < K; k += 4 * LANES) {
        int64_t end = k + 4 * LANES < K ? k + 4 * LANES : K;
        Mask seen = {0};
        for (int64_t j = k; j < end; j += LANES) {
            Vec x = load(v + j, end - j, 0.0f);
            seen |= (x > all(unseen)) | (x < all(-unseen));
        }
        if (any(seen))
            for (int64_t j = k; j < end; j++) v[j] = advance(v[j], 0, step, vote);
    }
    v[predicted] = advance(kept_predicted, 1, step, vote);
    v[label] = kept_label;
}

typedef struct {
    float *u, *v;
    void *classes; /* NULL: dense */
    float *mean_loss, *mean_margin, *mean_fit;
    int32_t *visits, *evictions;
    float *evicted;
    int64_t K, slots, class_bytes;
    uint64_t seed;
    int64_t first, stride;
    float initial_std;
} Table;

static void visit_slots(Table *table, int64_t row, int64_t label, int64_t predicted, Step step, float vote) {
    float *v = table->v + row * table->slots;
    int64_t base = row * table->slots, slot = 0;
    int hit = 0;
    float smallest = INFINITY;
    for (int64_t j = 0; j < table->slots; j++) {
        int32_t class_ = class_at(table->classes, table->class_bytes, base + j);
        if (class_ == FREE) {
            if (smallest >= 0.0f) smallest = -1.0f, slot = j; /* the first free slot */
            continue;
        }
        hit |= class_ == predicted;
        if (class_ != label) v[j] = advance(v[j], class_ == predicted, step, vote);
        if (fabsf(v[j]) < smallest) smallest = fabsf(v[j]), slot = j;
    }
    if (predicted == label || hit) return;
    if (smallest >= 0.0f) { /* no free slot: evict the smallest */
        float lost = v[slot] * v[slot];
        table->evictions[row]++;
        if (lost > table->evicted[row]) table->evicted[row] = lost;
    }
    uint64_t sample = (uint64_t)(row * table->stride + table->first);
    v[slot] = advance(initial_v(table->seed, sample, (uint32_t)predicted, table->initial_std), 1, step, vote);
    if (table->class_bytes == 2)
        ((int16_t *)table->classes)[base + slot] = (int16_t)predicted;
    else
        ((int32_t *)table->classes)[base + slot] = (int32_t)predicted;
}

void sopdist_rows(Table *table, const int64_t *index, const int64_t *labels, const int64_t *predicted, const float *loss,
                  const float *margin, const float *pull, const float *fit, int64_t B, int rule, float rate_v,
                  float rate_u, int threads) {
    Step step = {rule, rate_v, rate_u};
#pragma omp parallel num_threads(threads)
    for (int64_t i = 0; i < B; i++) {
        int64_t row = index[i];
        /* Each row belongs to one thread, which visits it in batch order. The team may be smaller than `threads`. */
        if (predicted[i] == DROPPED || row % omp_get_num_threads() != omp_get_thread_num()) continue;
        float count = (float)++table->visits[row];
        table->mean_loss[row] += (loss[i] - table->mean_loss[row]) / count;
        table->mean_margin[row] += (margin[i] - table->mean_margin[row]) / count;
        table->mean_fit[row] += (fit[i] - table->mean_fit[row]) / count;
        table->u[row] = next_u(table->u[row], predicted[i] != labels[i], margin[i], pull[i], step);
        if (table->classes == NULL)
            shrink_row(table->v + row * table->K, table->K, predicted[i], labels[i], step, -margin[i]);
        else
            visit_slots(table, row, labels[i], predicted[i], step, -margin[i]);
    }
}
