"""The recipes T1 to T16 that show K-FAC to be right, each with the control that shows the test to be no empty one.

All in float64, against oracles that share no code with kfac: dense matrices by ``torch.func`` and curvlinops
(:mod:`tests.kfac.oracle`), and the sequential algorithm in explicit formulas (:mod:`tests.kfac.reference`).

====  =============================  ==================================================  ==============================
what  file                           statement                                           control
====  =============================  ==================================================  ==============================
T1    test_t01_one_datum             for one datum K-FAC is the GGN and the empirical    seven data: another matrix
                                     Fisher; elsewhere it is curvlinops' K-FAC           (> 1 %), last layer apart
T1    test_t01_other_layers          blocks of norms, biases, embeddings and tied        blocks left out, several
                                     weights are those of the dense matrices             tokens, one use alone
T2    test_t02_deep_linear           deep linear regression: K-FAC is the GGN            empirical is not
T3    test_t03_monte_carlo           sampled labels converge to the GGN, as M^-1/2       another label distribution
T4    test_t04_expand                positions that do not mix count as samples: the     a pooled network is not
                                     GGN, and K-FAC of the flattened tokens
T5    test_t05_reduce                pooled positions, summed first: the GGN             expand is far from it
T6    test_t06_mixed_pooling         pooling between layers: before it reduce only,      expand before the pooling
                                     after it both; A differs, G does not
T7    test_t07_convolutions          a convolution (stride, padding, dilation, groups,   patches without the dilation
                                     1-3 sizes) is a linear layer on patches
T8    test_t08_reductions            repeated data changes nothing; a sum's G over its   kaisa's scaling: G / k^2; a
                                     number of terms is the mean's; padding is no term   sum not divided; padding told
                                                                                         not, or counted
T9    test_t09_damping               the step is the dense solve; (cA, G/c) changes      plain damping changes; the
                                     neither pi nor exact; factors are not touched       last bit of a factor counts
T10   test_t10_ekfac                 eigenvalues diag(U^T F U): nearer to F than K-FAC   a random basis is farther
T11   test_t11_optimum_and_...       one step solves least squares; affine changes of    SGD does neither
      invariance                     the inputs change no step
T12   test_t12_statistics            averages of a constant, micro-batches, gradients    losses that are not divided,
                                     untouched, in-place activations, frozen             a scale that K-FAC does not
                                     parameters, loss scales, overflows                  know, other data
T13   test_t13_distribution          several ranks hold one process's factors            no all-reduce of the factors
T14   test_t14_schedules,            every schedule gives the sequential result, also    inverses of the wrong owner,
      test_t14_races                 with random delays (200 seeds of random plans,      no waiting, for one kind of
                                     more of each kind of plan)                          message alone, another order
T15   test_t15_resume                checkpoints at any step continue to the last bit    a factor lost or off by 1e-12
T16   test_t16_inverses              |XM - I| <= 10 eps kappa; float64 where float32     a slightly wrong inverse
                                     fails; named errors where there is no inverse
====  =============================  ==================================================  ==============================

T13 to T15 look at one launch of ranks for each of 1, 2 and 4 processes (:mod:`tests.kfac.recipes.cells`): every
pipelining, fusion, placement and broadcast of the inverses. :mod:`tests.kfac.recipes.delays` is the race finder of T14.
"""
