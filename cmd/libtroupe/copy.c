#include "copy.h"

#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

enum { LINE = 64, PAGE = 4096, PAGES = 4 };

// copy_line copies one cache line. The line goes straight to memory; an ordinary write would read the old one from there first.
static inline void copy_line(char *to, const char *from) {
	for (int i = 0; i < LINE; i += 16)
		_mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
}

// The lines of four pages are copied in turns: four banks of memory work at the same time, where the lines of one page
// would wait for each other. The C library does the same, but only above a size that depends on the machine.
void copy_past_caches(char *to, const char *from, size_t n) {
	size_t head = -(uintptr_t)to % LINE; // streaming writes need aligned addresses
	if (head > n)
		head = n;
	memcpy(to, from, head);
	size_t at = head;
	for (; at + PAGES * PAGE <= n; at += PAGES * PAGE)
		for (size_t line = at; line < at + PAGE; line += LINE)
			for (size_t i = line; i < line + PAGES * PAGE; i += PAGE) {
				_mm_prefetch(from + i + PAGES * PAGE, _MM_HINT_T0);
				copy_line(to + i, from + i);
			}
	_mm_sfence(); // other threads see the writes before anything that this thread does next
	memcpy(to + at, from + at, n - at);
}

#else

void copy_past_caches(char *to, const char *from, size_t n) { memcpy(to, from, n); }

#endif
