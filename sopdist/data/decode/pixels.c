/* Crop, resize, mirror and normalise one image: the part of the `cpu` decoder that is neither file format nor Python.
 *
 * The resize is bilinear with antialiasing: a triangle filter that widens with the reduction, weights in 22-bit fixed
 * point, one pass over rows and one over columns, rounded to bytes in between. Beyond an edge, the edge pixel is
 * repeated. The result agrees with DALI up to one level, and is bit-identical to Pillow on an image that is padded in
 * this way (pixels.py does so if no C compiler was available).
 *
 * Pixels are RGB bytes and rows are contiguous. pixels.py calls this through ctypes, which releases the GIL.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define MULTIVERSIONED __attribute__((target_clones("avx2", "default"), noinline))
#else
#define MULTIVERSIONED
#endif

#define PRECISION 22
#define HALF (1 << (PRECISION - 1))

typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));

/* For each output pixel: the first input pixel that contributes, how many do, and their weights. */
typedef struct {
    int taps;       /* weights allocated per output pixel */
    int *first;     /* (out) */
    int *count;     /* (out) */
    int32_t *weight; /* (out, taps) */
} Filter;

/* Weights are not negative, so neither is a sum. Rounded weights can add up to slightly more than one. */
static inline uint8_t to_byte(int32_t sum) {
    int32_t value = sum >> PRECISION;
    return value > 255 ? 255 : (uint8_t)value;
}

static inline __attribute__((always_inline)) i32x8 two_pixels(const uint8_t *upper, const uint8_t *lower) {
    uint32_t a, b;
    memcpy(&a, upper, 4);
    memcpy(&b, lower, 4);
    /* Shifts and a mask, because gcc splits up __builtin_convertvector of bytes, which is twice as slow. */
    u32x8 pixels = {a, a, a, a, b, b, b, b}, shifts = {0, 8, 16, 24, 0, 8, 16, 24};
    return (i32x8)((pixels >> shifts) & 255);
}

/* weight(k) = triangle((k + 1/2 - centre) / scale), normalised, where k = 0 is `margin` pixels before the edge. */
static int make_filter(Filter *filter, int in, int out) {
    double ratio = (double)in / out, scale = ratio < 1.0 ? 1.0 : ratio;
    int margin = (int)scale + 2, taps = 2 * margin + 1;
    filter->taps = taps;
    filter->first = malloc(sizeof(int) * (size_t)out);
    filter->count = malloc(sizeof(int) * (size_t)out);
    filter->weight = malloc(sizeof(int32_t) * (size_t)out * (size_t)taps);
    double *exact = malloc(sizeof(double) * (size_t)taps);
    if (!filter->first || !filter->count || !filter->weight || !exact) {
        free(exact);
        return 0;
    }
    for (int i = 0; i < out; i++) {
        double centre = margin + (i + 0.5) * ratio, sum = 0.0;
        int low = (int)(centre - scale + 0.5), count = (int)(centre + scale + 0.5) - low;
        int32_t *weight = filter->weight + (size_t)i * taps;
        for (int k = 0; k < count; k++) {
            double distance = (k + low - centre + 0.5) * (1.0 / scale);
            distance = distance < 0.0 ? -distance : distance;
            exact[k] = distance < 1.0 ? 1.0 - distance : 0.0;
            sum += exact[k];
        }
        /* Beyond an edge, the edge pixel is repeated: weights there are added to the weight of the edge pixel. */
        int first = low - margin, last = first + count - 1;
        int inside_first = first < 0 ? 0 : first, inside_last = last >= in ? in - 1 : last;
        memset(weight, 0, sizeof(int32_t) * (size_t)taps);
        for (int k = 0; k < count; k++) {
            int pixel = first + k;
            pixel = pixel < inside_first ? inside_first : pixel > inside_last ? inside_last : pixel;
            weight[pixel - inside_first] += (int32_t)(0.5 + exact[k] / sum * (1 << PRECISION));
        }
        filter->first[i] = inside_first;
        filter->count[i] = inside_last - inside_first + 1;
    }
    free(exact);
    return 1;
}

static void free_filter(Filter *filter) {
    free(filter->first);
    free(filter->count);
    free(filter->weight);
}

/* Resize rows of `in_stride` bytes to `out` pixels, two rows at a time, which share the weights. A pixel is read as
 * four bytes, the fourth of which belongs to the next pixel; the last pixel before `in_end` has no next one. */
MULTIVERSIONED
static void resize_rows(const uint8_t *in, size_t in_stride, uint8_t *to, int rows, int out, const Filter *filter,
                        const uint8_t *in_end) {
    size_t to_stride = 3 * (size_t)out;
    for (int row = 0; row < rows; row += 2) {
        const uint8_t *upper = in + in_stride * (size_t)row, *lower = row + 1 < rows ? upper + in_stride : upper;
        uint8_t *to_upper = to + to_stride * (size_t)row, *to_lower = row + 1 < rows ? to_upper + to_stride : to_upper;
        for (int i = 0; i < out; i++) {
            size_t at = 3 * (size_t)filter->first[i];
            int count = filter->count[i];
            const int32_t *weight = filter->weight + (size_t)i * filter->taps;
            i32x8 sum = {HALF, HALF, HALF, HALF, HALF, HALF, HALF, HALF};
            int readable = lower + at + 3 * (size_t)count + 1 <= in_end ? count : count - 1;
            for (int k = 0; k < readable; k++, at += 3) sum += two_pixels(upper + at, lower + at) * weight[k];
            if (readable < count) {
                uint8_t last[8] = {upper[at], upper[at + 1], upper[at + 2], 0, lower[at], lower[at + 1], lower[at + 2], 0};
                sum += two_pixels(last, last + 4) * weight[readable];
            }
            for (int c = 0; c < 3; c++) {
                to_upper[3 * i + c] = to_byte(sum[c]);
                to_lower[3 * i + c] = to_byte(sum[4 + c]);
            }
        }
    }
}

/* Resize columns, one full row of `width` bytes at a time. */
MULTIVERSIONED
static void resize_columns(const uint8_t *in, size_t in_stride, uint8_t *to, size_t width, int out, int32_t *sum,
                           const Filter *filter) {
    for (int i = 0; i < out; i++, to += width) {
        const int32_t *weight = filter->weight + (size_t)i * filter->taps;
        const uint8_t *row = in + (size_t)filter->first[i] * in_stride;
        for (size_t j = 0; j < width; j++) sum[j] = HALF;
        for (int k = 0; k < filter->count[i]; k++, row += in_stride)
            for (size_t j = 0; j < width; j++) sum[j] += row[j] * weight[k];
        for (size_t j = 0; j < width; j++) to[j] = to_byte(sum[j]);
    }
}

static void mirror_rows(uint8_t *pixels, int rows, int width) {
    for (int row = 0; row < rows; row++, pixels += 3 * (size_t)width)
        for (int a = 0, b = width - 1; a < b; a++, b--)
            for (int c = 0; c < 3; c++) {
                uint8_t swap = pixels[3 * a + c];
                pixels[3 * a + c] = pixels[3 * b + c];
                pixels[3 * b + c] = swap;
            }
}

/* Resize the box (x, y, box_w, box_h) of an image to `side` x `side` pixels. The box may extend beyond the image, which
 * is black there. Returns 0 if memory allocation failed. */
int sopdist_crop(const uint8_t *image, int image_h, int image_w, int x, int y, int box_w, int box_h, int mirror, int side,
                 uint8_t *to) {
    size_t stride = 3 * (size_t)image_w, out_stride = 3 * (size_t)side;
    const uint8_t *box = image, *end = image + stride * (size_t)image_h;
    uint8_t *padded = NULL, *between = NULL;
    int32_t *sum = NULL;
    int done = 0;
    Filter across = {0}, down = {0};

    /* 1. The box as a part of the image, or, if it extends beyond the image, a copy padded with black. */
    if (x >= 0 && y >= 0 && x + box_w <= image_w && y + box_h <= image_h) {
        box = image + stride * (size_t)y + 3 * (size_t)x;
    } else {
        size_t box_stride = 3 * (size_t)box_w;
        padded = calloc((size_t)box_h, box_stride);
        if (!padded) goto out;
        int left = x < 0 ? -x : 0, top = y < 0 ? -y : 0;
        int right = x + box_w > image_w ? image_w - x : box_w, bottom = y + box_h > image_h ? image_h - y : box_h;
        for (int row = top; row < bottom && left < right; row++)
            memcpy(padded + box_stride * (size_t)row + 3 * (size_t)left,
                   image + stride * (size_t)(y + row) + 3 * (size_t)(x + left), 3 * (size_t)(right - left));
        box = padded;
        stride = box_stride;
        end = padded + box_stride * (size_t)box_h;
    }

    /* 2. Resize columns first if they get shorter, so that the more expensive pass over rows has fewer rows. Skip a
     * pass that would change nothing. */
    int columns_first = box_h > side;
    if (box_h != side && !make_filter(&down, box_h, side)) goto out;
    if (box_w != side && !make_filter(&across, box_w, side)) goto out;
    if (box_h != side) {
        sum = malloc(sizeof(int32_t) * 3 * (size_t)(box_w > side ? box_w : side));
        if (!sum) goto out;
    }
    if (columns_first && box_w != side) {
        size_t between_stride = 3 * (size_t)box_w;
        between = malloc(between_stride * (size_t)side);
        if (!between) goto out;
        resize_columns(box, stride, between, between_stride, side, sum, &down);
        resize_rows(between, between_stride, to, side, side, &across, between + between_stride * (size_t)side);
    } else if (box_h != side && box_w != side) {
        between = malloc(out_stride * (size_t)box_h);
        if (!between) goto out;
        resize_rows(box, stride, between, box_h, side, &across, end);
        resize_columns(between, out_stride, to, out_stride, side, sum, &down);
    } else if (box_w != side) {
        resize_rows(box, stride, to, side, side, &across, end);
    } else if (box_h != side) {
        resize_columns(box, stride, to, out_stride, side, sum, &down);
    } else {
        for (int row = 0; row < side; row++) memcpy(to + out_stride * (size_t)row, box + stride * (size_t)row, out_stride);
    }
    if (mirror) mirror_rows(to, side, side);
    done = 1;
out:
    free_filter(&across);
    free_filter(&down);
    free(padded);
    free(between);
    free(sum);
    return done;
}

/* (pixel - mean) * scale for `pixels` RGB pixels. */
MULTIVERSIONED
void sopdist_normalize(const uint8_t *in, float *to, int64_t pixels, const float *mean, const float *scale) {
    /* Eight pixels per iteration, with 24 constants in order, so that the compiler can vectorise the loop. */
    float means[24], scales[24];
    for (int i = 0; i < 24; i++) means[i] = mean[i % 3], scales[i] = scale[i % 3];
    int64_t i = 0;
    for (; i + 8 <= pixels; i += 8, in += 24, to += 24)
        for (int j = 0; j < 24; j++) to[j] = ((float)in[j] - means[j]) * scales[j];
    for (int j = 0; j < 3 * (int)(pixels - i); j++) to[j] = ((float)in[j] - means[j]) * scales[j];
}

/* Undo the row filters of a PNG: each row of `raw` is one byte that names the filter, and `width * channels` bytes.
 * Writes RGB; grey is replicated. Returns 0 if a filter is unknown. */
int sopdist_unfilter(uint8_t *raw, int height, int width, int channels, uint8_t *to) {
    size_t length = (size_t)width * channels, step = (size_t)channels;
    const uint8_t *above = NULL;
    for (int row = 0; row < height; row++, raw += length + 1) {
        uint8_t *line = raw + 1;
        switch (raw[0]) {
        case 0:
            break;
        case 1: /* Sub: add the pixel to the left */
            for (size_t i = step; i < length; i++) line[i] += line[i - step];
            break;
        case 2: /* Up: add the pixel above */
            for (size_t i = 0; above && i < length; i++) line[i] += above[i];
            break;
        case 3: /* Average: add the mean of both */
            for (size_t i = 0; i < length; i++)
                line[i] += ((i < step ? 0 : line[i - step]) + (above ? above[i] : 0)) / 2;
            break;
        case 4: /* Paeth: add left, above or above left, whichever is closest to left + above - above left */
            for (size_t i = 0; i < length; i++) {
                int left = i < step ? 0 : line[i - step], up = above ? above[i] : 0;
                int corner = i < step || !above ? 0 : above[i - step];
                int to_left = abs(up - corner), to_up = abs(left - corner), to_corner = abs(left + up - 2 * corner);
                line[i] += to_left <= to_up && to_left <= to_corner ? left : to_up <= to_corner ? up : corner;
            }
            break;
        default:
            return 0;
        }
        above = line;
        if (channels == 3)
            memcpy(to, line, length);
        else
            for (size_t i = 0; i < length; i++) to[3 * i] = to[3 * i + 1] = to[3 * i + 2] = line[i];
        to += 3 * (size_t)width;
    }
    return 1;
}
