/* Softmax attention of (n, d) arrays, as a program: a candidate for the conformance checks.
 *
 * attention [unstable|strict] INPUT OUTPUT reads float64 q, k, v (and int64 causal) from a
 * safetensors file and writes `out`. `unstable` leaves out the maximum, `strict` hides the key
 * of the query itself. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *header;
static double *data;

/* The position of the first number after `key` in the entry of a tensor. */
static long number(const char *name, const char *key, int index) {
    char quoted[32];
    sprintf(quoted, "\"%s\":", name);
    char *at = strstr(header, quoted);
    if (!at) return -1;
    at = strchr(strstr(at, key), '[') + 1;
    while (index--) at = strchr(at, ',') + 1;
    return strtol(at, NULL, 10);
}

static int call(const char *defect, const char *input, const char *output) {
    unsigned long long size;
    FILE *in = fopen(input, "rb");
    if (!in || fread(&size, 8, 1, in) != 1) return 1;
    header = calloc(size + 1, 1);
    if (fread(header, 1, size, in) != size) return 1;
    if (!fread(data, 1, 1 << 26, in)) return 1;
    fclose(in);
    char *bytes = (char *)data;
    double *q = (double *)(bytes + number("q", "data_offsets", 0));
    double *k = (double *)(bytes + number("k", "data_offsets", 0));
    double *v = (double *)(bytes + number("v", "data_offsets", 0));
    long n = number("q", "shape", 0), d = number("q", "shape", 1);
    long m = number("k", "shape", 0), e = number("v", "shape", 1);
    long flag = number("causal", "data_offsets", 0);
    int causal = flag >= 0 && *(long long *)(bytes + flag);
    double *out = calloc(n * e, sizeof *out), *s = malloc(m * sizeof *s);
    for (long i = 0; i < n; i++) {
        long last = causal ? i + m - n : m - 1;
        if (causal && !strcmp(defect, "strict") && last > 0) last--;
        double most = -INFINITY, total = 0;
        for (long j = 0; j <= last; j++) {
            s[j] = 0;
            for (long a = 0; a < d; a++) s[j] += q[i * d + a] * k[j * d + a];
            s[j] /= sqrt((double)d);
            if (s[j] > most) most = s[j];
        }
        if (!strcmp(defect, "unstable")) most = 0;
        for (long j = 0; j <= last; j++) {
            double weight = exp(s[j] - most);
            total += weight;
            for (long a = 0; a < e; a++) out[i * e + a] += weight * v[j * e + a];
        }
        for (long a = 0; a < e; a++) out[i * e + a] /= total;
    }
    char text[256];
    sprintf(text, "{\"out\":{\"dtype\":\"F64\",\"shape\":[%ld,%ld],\"data_offsets\":[0,%ld]}}", n,
            e, n * e * 8);
    size = strlen(text);
    FILE *file = fopen(output, "wb");
    if (!file) return 1;
    fwrite(&size, 8, 1, file);
    fwrite(text, 1, size, file);
    fwrite(out, 8, n * e, file);
    free(header);
    free(out);
    free(s);
    return fclose(file) != 0;
}

int main(int argc, char **argv) {
    data = malloc(1 << 26);
    return call(argc > 3 ? argv[1] : "", argv[argc - 2], argv[argc - 1]);
}
