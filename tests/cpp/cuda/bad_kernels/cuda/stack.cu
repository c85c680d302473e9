// What check_kernels.py must find: an array that is indexed at run time lies in local memory.
__global__ void counts(const int* values, int count, int* bins) {
  int local[100] = {};
  for (int i = 0; i < count; ++i) local[values[i] % 100] += i;
  for (int i = 0; i < 100; ++i) bins[i] = local[i];
}
