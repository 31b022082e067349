/* assets.h: files that are part of the binary (the page, the API's contract). The table ends with a NULL path. */
#pragma once
struct asset {
	const char *path;                /* as in the source tree: "web/index.html" */
	const unsigned char *begin, *end;
};
extern const struct asset assets[];
