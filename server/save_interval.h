/* save_interval.h: how often a training should save, for what a save costs it and how often it fails.
 *
 * With exponentially distributed failures, each save too many costs its time, each one too few the work since the last one. All times are
 * seconds; the interval is the work between the end of one save and the begin of the next. */
#pragma once

/* J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974: sqrt(2 cost mtbf). */
double save_interval_young(double cost_s, double mtbf_s);
/* J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, equation 37:
 * sqrt(2 cost mtbf) (1 + sqrt(cost / 2 mtbf) / 3 + (cost / 2 mtbf) / 9) - cost as long as cost < 2 mtbf, else mtbf. */
double save_interval_daly(double cost_s, double mtbf_s);
