/* Golden vectors of refattn: |output - data| <= tolerance * size must hold,
   and where data are not finite, outputs must be the same. */
#ifndef REFATTN_VECTORS_H
#define REFATTN_VECTORS_H

#include <math.h>

/* Row-major; of masks 1 where a query sees a key; indices are numbers too; size is of outputs. */
typedef struct {
    const char *name;
    int axes, shape[4];
    const double *data, *size;
} refattn_tensor;

typedef struct {
    const char *id, *estimator, *group, *features, *comment;
    const char *option, *value; /* what libraries disagree on, "" if it is not about that */
    double scale; /* NAN means 1 / sqrt(d) */
    double softcap, dropout_p; /* 0 for none */
    int causal, left, right; /* sides of the window, -1 for no limit */
    int chunk, log_size; /* keys of a chunk, 0 for none, and whether summaries count as many */
    double tolerance_float64, tolerance_float32; /* 0 if it says nothing in this type */
    int inputs, outputs;
    const refattn_tensor *input, *output;
} refattn_case;

