/*
 * The recorder: stands in for the runtime library under a compiled kernel's host code.
 *
 * An object exported by CuTe-DSL calls about a dozen functions of libcute_dsl_runtime.so, thin wrappers of the CUDA
 * runtime.  This library offers the same names over no device at all: loading a library and looking up a kernel hand
 * out names, attributes come from a table that Python fills, and a launch is passed to a callback, which copies the
 * grid, the attributes and the parameter bytes before the host code's stack frame is gone.
 *
 * Signatures are those of the CUDA runtime API; only the layouts that the host code builds itself (cudaLaunchConfig_t,
 * cudaLaunchAttribute) are spelled out here.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_SUPPORTED = 801 };

typedef struct {
  uint32_t x, y, z;
} Dim3;

typedef struct {
  int32_t id;
  int32_t pad;
  union {
    char bytes[64];
    int32_t number;
    Dim3 dim;
  } value;
} LaunchAttribute;

typedef struct {
  Dim3 grid, block;
  uint64_t dynamic_shared_bytes;
  void *stream;
  const LaunchAttribute *attributes;
  uint32_t attribute_count;
} LaunchConfig;

/* A kernel handle is nothing but its name; handles live as long as the process, as the host code caches them. */
typedef struct Kernel {
  struct Kernel *next;
  char name[];
} Kernel;

typedef int32_t (*LaunchCallback)(const char *kernel, const LaunchConfig *config, void **arguments);

static LaunchCallback on_launch;
static Kernel *kernels;
static char last_error[512];

enum { ATTRIBUTES = 256 };
static int32_t device_attribute[ATTRIBUTES];
static uint8_t device_attribute_known[ATTRIBUTES];

static int32_t fail(int32_t code, const char *what, const char *detail) {
  snprintf(last_error, sizeof last_error, "%s: %s", what, detail);
  return code;
}

/* ---- What Python calls ------------------------------------------------------------------------------------------ */

EXPORT void coflash_recorder_set_callback(LaunchCallback callback) { on_launch = callback; }

EXPORT void coflash_recorder_set_device_attribute(int32_t attribute, int32_t value) {
  if (attribute >= 0 && attribute < ATTRIBUTES) {
    device_attribute[attribute] = value;
    device_attribute_known[attribute] = 1;
  }
}

/* The text of the last refusal, cleared by reading it. */
EXPORT const char *coflash_recorder_take_error(void) {
  static char taken[sizeof last_error];
  memcpy(taken, last_error, sizeof taken);
  last_error[0] = 0;
  return taken;
}

/* ---- What the compiled host code calls -------------------------------------------------------------------------- */

EXPORT int32_t cuda_dialect_init_library_once(void **library, int32_t (*init)(void **), int32_t (*load)(void **, int32_t),
                                              void (*on_error)(const char *kind, const char *message)) {
  if (*library) return SUCCESS;
  int32_t status = init(library);
  if (!status) status = load(library, 0);
  if (status) {
    *library = NULL;
    on_error("RuntimeError", last_error[0] ? last_error : "the kernel library could not be loaded");
  }
  return status;
}

EXPORT void cuda_dialect_unload_library_once(void **library) { *library = NULL; }

EXPORT int32_t _cudaLibraryLoadData(void **library, const void *image) {
  *library = (void *)image;
  return SUCCESS;
}

EXPORT int32_t _cudaLibraryUnload(void *library) {
  (void)library;
  return SUCCESS;
}

EXPORT int32_t _cudaLibraryGetKernel(Kernel **kernel, void *library, const char *name) {
  (void)library;
  for (Kernel *known = kernels; known; known = known->next)
    if (!strcmp(known->name, name)) {
      *kernel = known;
      return SUCCESS;
    }
  Kernel *made = malloc(sizeof *made + strlen(name) + 1);
  if (!made) return fail(2, "cudaLibraryGetKernel", "out of memory");
  strcpy(made->name, name);
  made->next = kernels;
  *kernel = kernels = made;
  return SUCCESS;
}

EXPORT int32_t _cudaGetDevice(int32_t *device) {
  *device = 0;
  return SUCCESS;
}

EXPORT int32_t _cudaSetDevice(int32_t device) {
  return device == 0 ? SUCCESS : fail(101, "cudaSetDevice", "the virtual GPU is device 0");
}

EXPORT int32_t _cudaDeviceGetAttribute(int32_t *value, int32_t attribute, int32_t device) {
  (void)device;
  if (attribute < 0 || attribute >= ATTRIBUTES || !device_attribute_known[attribute]) {
    char number[32];
    snprintf(number, sizeof number, "attribute %d", attribute);
    return fail(INVALID_VALUE, "cudaDeviceGetAttribute is not recorded for", number);
  }
  *value = device_attribute[attribute];
  return SUCCESS;
}

/* The host code asks for the statically allocated shared memory (attribute 1) and for nothing else; CuTe-DSL kernels
 * have none, since all their shared memory is dynamic. */
EXPORT int32_t _cuKernelGetAttribute(int32_t *value, int32_t attribute, Kernel *kernel, int32_t device) {
  (void)device;
  if (attribute != 1) return fail(INVALID_VALUE, "cuKernelGetAttribute is not recorded for", kernel->name);
  *value = 0;
  return SUCCESS;
}

EXPORT int32_t _cudaFuncSetAttribute(const void *kernel, int32_t attribute, int32_t value) {
  (void)kernel, (void)attribute, (void)value;
  return SUCCESS;
}

EXPORT int32_t _cudaKernelSetAttributeForDevice(Kernel *kernel, int32_t attribute, int32_t value, int32_t device) {
  (void)device;
  return _cudaFuncSetAttribute(kernel, attribute, value);
}

/* The driver's encoding of a tiled tensor map, for host code that asks the driver instead of doing it itself. The bits
 * are those that tensormap.py reads; the driver's two words of its own stay zero. */
EXPORT int32_t _cuTensorMapEncodeTiled(uint32_t *map, uint32_t type, uint32_t rank, uint64_t address,
                                       const uint64_t *extents, const uint64_t *strides, const uint32_t *box,
                                       const uint32_t *element_strides, uint32_t interleave, uint32_t swizzle,
                                       uint32_t l2_promotion, uint32_t fill) {
  /* Codes of the driver's types 0 to 12; the tf32 types are float32 types with a flag. */
  static const uint32_t code[] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 7, 8};
  if (type > 12 || rank < 1 || rank > 5 || interleave > 2 || swizzle > 3 || l2_promotion > 3 || fill > 1 ||
      address % 16)
    return fail(INVALID_VALUE, "cuTensorMapEncodeTiled", "a type, rank, mode or address the driver refuses");
  memset(map, 0, 128);
  map[0] = (uint32_t)address, map[1] = (uint32_t)(address >> 32);
  map[2] = (rank - 1) << 4 | code[type] << 7 | interleave << 11 | swizzle << 13 | fill << 15 |
           (uint32_t)(type > 10) << 16 | l2_promotion << 17;
  for (uint32_t i = 0; i < rank; i++) {
    if (extents[i] < 1 || extents[i] > 1ull << 32 || box[i] < 1 || box[i] > 256 || element_strides[i] < 1 ||
        element_strides[i] > 8 || (i && (strides[i - 1] % 16 || strides[i - 1] >= 1ull << 40)))
      return fail(INVALID_VALUE, "cuTensorMapEncodeTiled", "an extent, stride or box the driver refuses");
    map[8 + i] = (uint32_t)(extents[i] - 1);
    map[13] |= (element_strides[i] - 1) << 3 * i;
    if (i == 0)
      map[13] |= (box[0] - 1) << 24;
    else {
      map[14] |= (box[i] - 1) << 8 * (i - 1);
      map[2 + i] = (uint32_t)(strides[i - 1] >> 4);
      map[7] |= (uint32_t)(strides[i - 1] >> 36) << 4 * (i - 1);
    }
  }
  return SUCCESS;
}

/* Host code ends the process where this is not zero; here the launch that follows is refused instead. */
static int32_t refused;

EXPORT void cuda_dialect_assert_success(int32_t code) {
  if (code) refused = code;
}

EXPORT int32_t _cudaLaunchKernelEx(const LaunchConfig *config, const Kernel *kernel, void **arguments) {
  if (refused) {
    int32_t code = refused;
    refused = SUCCESS;
    return code;
  }
  if (!on_launch) return fail(NOT_SUPPORTED, "cudaLaunchKernelEx", "nobody records");
  return on_launch(kernel->name, config, arguments);
}

/* Failures reach Python as an exception through the callback the caller hands in. */
EXPORT void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char *, const char **, int32_t), int32_t code) {
  char text[640];
  snprintf(text, sizeof text, "error %d under the recorder%s%s", code, last_error[0] ? ": " : "", last_error);
  const char *parts[] = {text};
  raise("RuntimeError", parts, 1);
}

EXPORT void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(
    void (*raise)(const char *, const char **, int32_t), int32_t grid_x, int32_t grid_y, int32_t grid_z,
    int32_t block_x, int32_t block_y, int32_t block_z, int32_t block_threads, int64_t dynamic_shared, int32_t device,
    int32_t max_threads, int32_t max_block_x, int32_t max_block_y, int32_t max_block_z, int32_t max_grid_x,
    int32_t max_grid_y, int32_t max_grid_z, int32_t max_shared, int32_t max_shared_optin, const char *violation,
    const char *source_file, int32_t line, int32_t column, int32_t end_column) {
  (void)block_threads, (void)device, (void)max_threads, (void)max_block_x, (void)max_block_y, (void)max_block_z;
  (void)max_grid_x, (void)max_grid_y, (void)max_grid_z, (void)max_shared, (void)column, (void)end_column;
  char text[1024];
  snprintf(text, sizeof text, "a launch of grid %d,%d,%d block %d,%d,%d with %lld bytes of shared memory (limit %d) is refused: %s (%s:%d)",
           grid_x, grid_y, grid_z, block_x, block_y, block_z, (long long)dynamic_shared, max_shared_optin,
           violation ? violation : "", source_file ? source_file : "?", line);
  const char *parts[] = {text};
  raise("RuntimeError", parts, 1);
}
