/* Host code as CuTe-DSL exports it, by hand: one tvm-ffi function that launches one kernel. */
#include <stdint.h>
#include <string.h>

typedef struct { int32_t type, pad; union { int64_t integer; double real; void *pointer; } value; } Any;
typedef struct { uint32_t x, y, z; } Dim3;
typedef struct { int32_t id, pad; union { char bytes[64]; Dim3 dim; } value; } Attribute;
typedef struct { Dim3 grid, block; uint64_t shared; void *stream; Attribute *attributes; uint32_t count; } Config;

extern int _cudaLibraryLoadData(void **, const void *, ...);
extern int _cudaLibraryGetKernel(void **, void *, const char *);
extern int _cudaDeviceGetAttribute(int32_t *, int32_t, int32_t);
extern int _cudaLaunchKernelEx(const Config *, void *, void **);
extern int cuda_dialect_init_library_once(void **, int (*)(void **), int (*)(void **, int32_t), void *);
extern int TVMFFIErrorSetRaisedFromCStr(const char *, const char *);
extern void CuteDSLRT_TVMFFISetRaisedCudaError(void *, int32_t);
extern void TVMFFIErrorSetRaisedFromCStrParts(const char *, const char **, int32_t);
#ifdef NEEDS_MORE
extern int _cudaGraphLaunch(void *);
#endif

static void *library, *kernel;
static int init(void **loaded) { return _cudaLibraryLoadData(loaded, "image"); }
static int load(void **loaded, int32_t device) {
  (void)device;
  return _cudaLibraryGetKernel(&kernel, *loaded, KERNEL);
}

/* launch(tensor, count, multiprocessors_attribute) */
int __tvm_ffi_launch(void *self, const Any *arguments, int32_t count, Any *result) {
  (void)self, (void)result;
  if (count != 3) return TVMFFIErrorSetRaisedFromCStr("TypeError", "expects 3 arguments"), -1;
  if (cuda_dialect_init_library_once(&library, init, load, TVMFFIErrorSetRaisedFromCStr)) return -1;
  char *object = arguments[0].value.pointer;
  /* A DLTensor argument is a pointer to it (type 7); a tensor object holds it behind its 24-byte header (type 70). */
  void **tensor = (void **)(arguments[0].type == 7 ? object : object + 24);
  if (((int32_t *)tensor)[2] != 2) return TVMFFIErrorSetRaisedFromCStr("ValueError", "not a CUDA tensor"), -1;
  int32_t multiprocessors = 0;
  int status = _cudaDeviceGetAttribute(&multiprocessors, (int32_t)arguments[2].value.integer, 0);
#ifdef NEEDS_MORE
  status |= _cudaGraphLaunch(0);
#endif
  uint64_t pointer = (uint64_t)tensor[0];
  uint32_t n = (uint32_t)arguments[1].value.integer;
  char block[128];
  memset(block, 7, sizeof block);
  void *values[] = {&pointer, &n, block};
  Attribute attribute = {4, 0, {.dim = {2, 1, 1}}};
  Config config = {{4, 2, 1}, {128, 1, 1}, 4096, 0, &attribute, 1};
  config.grid.x = multiprocessors;
  if (!status) status = _cudaLaunchKernelEx(&config, kernel, values);
  if (status) CuteDSLRT_TVMFFISetRaisedCudaError((void *)TVMFFIErrorSetRaisedFromCStrParts, status);
  return status ? -1 : 0;
}
