#include "core/isa.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#ifdef NORIA_HAS_amx
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace noria {

#define NORIA_DECLARE(level)                                                                        \
  namespace level {                                                                                 \
  extern const LinearKernels linear_kernels;                                                        \
  extern const ElementwiseKernels elementwise_kernels;                                              \
  extern const AttentionKernels attention_kernels;                                                  \
  extern const SamplingKernels sampling_kernels;                                                    \
  extern const LimitKernels limit_kernels;                                                          \
  static const Kernels table = {#level, &linear_kernels, &elementwise_kernels, &attention_kernels,  \
                                &sampling_kernels, &limit_kernels};                                 \
  }

#ifdef NORIA_HAS_baseline
NORIA_DECLARE(baseline)
#endif
#ifdef NORIA_HAS_avx2
NORIA_DECLARE(avx2)
#endif
#ifdef NORIA_HAS_avx512
NORIA_DECLARE(avx512)
#endif
#ifdef NORIA_HAS_avx512_bf16
NORIA_DECLARE(avx512_bf16)
#endif
#ifdef NORIA_HAS_amx
NORIA_DECLARE(amx)
#endif
#ifdef NORIA_HAS_neon
NORIA_DECLARE(neon)
#endif
#ifdef NORIA_HAS_neon_i8mm
NORIA_DECLARE(neon_i8mm)
#endif

#if defined(__aarch64__)
static bool neon_dot_products() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;
#endif
}

static bool neon_matrix_products() {
#if defined(__linux__) && defined(HWCAP2_I8MM) && defined(HWCAP2_BF16)
  const unsigned long found = getauxval(AT_HWCAP2);
  return (found & HWCAP2_I8MM) && (found & HWCAP2_BF16);
#else
  return false;
#endif
}
#endif

#ifdef NORIA_HAS_amx
// Tiles are 8 KB of state per thread, which the system saves only for processes that asked (Linux, Documentation/arch/x86/
// xstate.rst). It refuses where a thread's alternate signal stack is too small for that.
static bool ask_for_tiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  constexpr unsigned kTileStates = 3u << 17;   // of XCR0: the system manages tiles
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  unsigned a, b, c, d, low, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & kTileStates) != kTileStates) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

static bool has_tiles() {
  static const bool granted = ask_for_tiles();
  return granted;
}
#endif

static std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
#ifdef NORIA_HAS_baseline
  if (__builtin_cpu_supports("sse4.2")) found.push_back(&baseline::table);
#endif
  [[maybe_unused]] const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  [[maybe_unused]] const bool has_avx512 =
      has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
#ifdef NORIA_HAS_avx2
  if (has_avx2) found.push_back(&avx2::table);
#endif
#ifdef NORIA_HAS_avx512
  if (has_avx512) found.push_back(&avx512::table);
#endif
#ifdef NORIA_HAS_avx512_bf16
  // Intel's processors split vdpbf16ps into slow parts (their bf16 unit is AMX): widening to float32 is 1.4 times as fast
  // there, so their best level is the one without.
  if (has_avx512 && __builtin_cpu_supports("avx512bf16"))
    found.insert(__builtin_cpu_is("intel") && !found.empty() ? found.end() - 1 : found.end(), &avx512_bf16::table);
#endif
#ifdef NORIA_HAS_amx
  if (has_avx512 && has_tiles()) found.push_back(&amx::table);
#endif
#else
#ifdef NORIA_HAS_baseline
  found.push_back(&baseline::table);
#endif
#ifdef NORIA_HAS_neon
  if (neon_dot_products()) found.push_back(&neon::table);
#endif
#ifdef NORIA_HAS_neon_i8mm
  if (neon_dot_products() && neon_matrix_products()) found.push_back(&neon_i8mm::table);
#endif
#endif
  return found;
}

static const Kernels* chosen = nullptr;

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* table : usable()) names.push_back(table->name);
  return names;
}

void select_isa(const std::string& name) {
  std::string known;
  for (const Kernels* table : usable()) {
    if (name == table->name) {
      chosen = table;
      return;
    }
    known += std::string(known.empty() ? "" : ", ") + table->name;
  }
  throw std::invalid_argument("ISA level '" + name + "' is not available here; choose one of: " + known);
}

const Kernels& kernels() {
  if (!chosen) {
    const char* forced = std::getenv("NORIA_ISA");
    if (forced && *forced) select_isa(forced);
    else if (const auto found = usable(); !found.empty()) chosen = found.back();
    else throw std::runtime_error("this processor is older than any instruction set that Noria is built for");
  }
  return *chosen;
}

}  // namespace noria
